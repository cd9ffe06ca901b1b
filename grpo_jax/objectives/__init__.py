"""Formulas and the slots they fill: arrays in, arrays out.

| slot of an `Algorithm` | what can fill it is in |
|---|---|
| `advantage` | `advantages`, `returns`, by `outcome` and `whitened` of `slots` |
| `normalize` | `whitening` |
| `step_mask` | `masks` |
| `ratio` | `ratios` |
| `surrogate` | `surrogates`, by `with_hyperparams` of `slots` |
| `penalties`, `reference`, `reward`, `kl_controller`, `entropy_controller` | `penalties`, with those of `divergences` |
| `reduce` | `reductions` |
| `critic` | `losses` |

The slot `baseline` is filled by `grpo_jax.baselines`. Formulas take numbers of any type: half precision, integers and
booleans are converted first, as `precision.at_least_float32` says.
"""

from grpo_jax.objectives import (
    advantages,
    divergences,
    losses,
    masks,
    penalties,
    ratios,
    reductions,
    returns,
    slots,
    surrogates,
    whitening,
)
from grpo_jax.objectives.advantages import *  # noqa: F403
from grpo_jax.objectives.divergences import *  # noqa: F403
from grpo_jax.objectives.losses import *  # noqa: F403
from grpo_jax.objectives.masks import *  # noqa: F403
from grpo_jax.objectives.penalties import *  # noqa: F403
from grpo_jax.objectives.ratios import *  # noqa: F403
from grpo_jax.objectives.reductions import *  # noqa: F403
from grpo_jax.objectives.returns import *  # noqa: F403
from grpo_jax.objectives.slots import *  # noqa: F403
from grpo_jax.objectives.surrogates import *  # noqa: F403
from grpo_jax.objectives.whitening import *  # noqa: F403

__all__: list[str] = []
__all__ += advantages.__all__
__all__ += divergences.__all__
__all__ += losses.__all__
__all__ += masks.__all__
__all__ += penalties.__all__
__all__ += ratios.__all__
__all__ += reductions.__all__
__all__ += returns.__all__
__all__ += slots.__all__
__all__ += surrogates.__all__
__all__ += whitening.__all__
