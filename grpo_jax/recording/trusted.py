"""Host: what a folder may name. It may come from anyone, so nothing that it names is imported: SECURITY.md."""

import functools
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms import Algorithm
from grpo_jax.devices.execution_plan import ExecutionPlan
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_path
from grpo_jax.updates.optimizers import OPTIMIZERS

_SLOTS = "grpo_jax.objectives.", "grpo_jax.baselines.", "grpo_jax.groups"
# Of jax.numpy these alone: others read and write files.
_ARITHMETIC = (
    *("abs", "add", "clip", "cos", "cosh", "divide", "exp", "exp2", "expm1", "log", "log1p", "log2", "maximum"),
    *("minimum", "multiply", "negative", "ones_like", "power", "reciprocal", "sign", "sin", "sinh", "sqrt"),
    *("square", "subtract", "tan", "tanh", "zeros_like"),
)


@functools.cache
def trusted_objects() -> dict[str, Any]:
    """Functions and classes by import path: they compute with arrays, and call nothing but what they are given.

    Of this package those that fill slots, the optimisers, and the classes of a config's values; of JAX arithmetic and
    jax.nn; layers of flax.linen; and the public names of optax. None reads, writes, imports, or makes an environment.
    """
    found: dict[str, Any] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith(_SLOTS)]:
        own = {name: each for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
        found |= {f"{module.__name__}:{name}": each for name, each in own.items() if callable(each)}
    for each in (Algorithm, ExecutionPlan, Hyperparams, *OPTIMIZERS.values()):
        found[import_path(each)] = each
    for package, names in ((jnp, _ARITHMETIC), (jax.nn, dir(jax.nn)), (nn, dir(nn)), (optax, dir(optax))):
        for name in names:
            each = getattr(package, name)
            is_own = str(getattr(each, "__module__", "")).startswith(package.__name__.partition(".")[0])
            is_layer = isinstance(each, type) and issubclass(each, nn.Module)
            if name.startswith("_") or not callable(each) or not is_own or (package is nn and not is_layer):
                continue
            # The second is how `import_path` writes it, often with a private module.
            found |= {path: each for path in (f"{package.__name__}:{name}", import_path(each)) if path is not None}
    return found


def find_trusted(path: str, field: str) -> Any:
    """The object at an import path, which is not imported but looked up.

    Raises:
      ConfigError: it is none of `trusted_objects`, or a suite's environment by the name of a module.
    """
    suite, _, name = path.partition(":")
    if field == "environment" and suite in SUITES and ":" not in name:
        return path
    if path not in trusted_objects():
        raise ConfigError(
            f"{field} is {path!r}: loading would import and run that code, and it is none of what a folder may name "
            "(SECURITY.md). If you trust who made the folder, write trust=True (--trust); or pass the run's config, "
            "load(folder, config=...)"
        )
    return trusted_objects()[path]
