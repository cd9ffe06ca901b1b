"""GiGPO: rollouts of a group are compared as a whole, and their steps where they stand in the same state."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.baselines.same_state import state_numbers
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import episode_scores, group_centered, group_normalized, returns_to_go
from grpo_jax.precision import at_least_float32
from grpo_jax.types import PyTree, Trajectory


def same_state_advantage(
    returns: jax.Array,
    state: PyTree,
    mask: jax.Array,
    group_size: int,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    ddof: int = 0,
) -> jax.Array:
    """Returns-to-go in standard deviations from their mean over the group's visits to the same state.

        A_t^i = (R_t^i - mean(R)) / (std(R) + eps),  over all (u, j) with s_u^j = s_t^i, j in the group of i

    The step term of GiGPO (https://arxiv.org/abs/2505.10978). A rollout's own earlier and later visits count too. A
    state that was visited once, or whose returns are all equal, gets exactly 0.

    Args:
      returns: `[T, N]` returns-to-go.
      state: each leaf `[T, N, ...]`; two states are the same if 64 bits of hash are.
      mask: `[T, N]`, true on the valid steps.
      group_size: members of a group; divides `N`. Static.
      normalize: without it, returns are only centred. Static.
      eps, ddof: as in `grpo_jax.objectives`.

    Returns:
      `[T, N]`.
    """
    returns, valid = at_least_float32(returns).reshape(-1), mask.astype(bool).reshape(-1)
    group = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.uint32) // group_size, mask.shape)
    # Invalid steps stand in a state of their own, which no valid step shares.
    ids, _ = state_numbers((group, mask.astype(jnp.uint32), state), jnp.zeros(mask.shape, jnp.int32))

    def over_visits(function, x):
        return function(x, ids, ids.size)[ids]

    excess = jnp.where(valid, returns - over_visits(jax.ops.segment_min, returns), 0.0)
    visits = over_visits(jax.ops.segment_sum, jnp.ones_like(excess))
    deviations = excess - over_visits(jax.ops.segment_sum, excess) / visits
    if normalize:
        squares = over_visits(jax.ops.segment_sum, jnp.square(deviations))
        deviations /= jnp.sqrt(squares / jnp.maximum(visits - ddof, 1)) + eps
    return jnp.where(valid, deviations, 0.0).reshape(mask.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class _GiGPO:
    bin_width: float | None
    normalize: bool

    def __call__(self, trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
        scores = episode_scores(trajectory, group_size)
        episode = (group_normalized if self.normalize else group_centered)(scores).reshape(1, -1)
        state = jax.tree.map(self._binned, trajectory.observation)
        returns = returns_to_go(trajectory, hyperparams, group_size)
        step = same_state_advantage(returns, state, trajectory.valid, group_size, normalize=self.normalize)
        return jnp.where(trajectory.valid, episode + hyperparams.step_advantage_coef * step, 0.0)

    def _binned(self, leaf: jax.Array) -> jax.Array:
        if self.bin_width is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.floor(leaf / self.bin_width)

    def __repr__(self) -> str:
        return f"gigpo_advantage({'' if self.bin_width is None else f'bin_width={self.bin_width}'})"


def gigpo_advantage(bin_width: float | None = None, *, normalize: bool = True) -> _GiGPO:
    """GiGPO's advantage: of the rollout in its group, plus that of the step among visits to the same state.

        A_t^i = A^E_i + step_advantage_coef A^S(s_t^i, a_t^i)

    https://arxiv.org/abs/2505.10978. The state is the observation, by its bits; A^E is GRPO's advantage, A^S
    `same_state_advantage` of the discounted returns-to-go.

    Args:
      bin_width: continuous observations are the same state in the same bin of this width, in their units; None: only
        if all bits are equal.
      normalize: without it, both terms are only centred.

    Returns:
      A function for the slot `advantage`.
    """
    return _GiGPO(bin_width, normalize)
