"""GiGPO: rollouts of a group are compared as a whole, and their steps where they stand in the same state.

A step of an environment is one action. A step of a text is one turn: what the policy writes until the task answers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.baselines.same_state import prefix_hashes, state_numbers
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams, number
from grpo_jax.objectives import episode_scores, group_normalized, returns_to_go
from grpo_jax.policies.token_policy import TokenCarry
from grpo_jax.precision import above_rounding, at_least_float32
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
    sizes: jax.Array | None = None,
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
      eps, ddof: as of `grpo_jax.objectives.whiten`.
      sizes: `[N]`, the sum of absolute rewards of a rollout, up to whose rounding returns are equal; None: their own.

    Returns:
      `[T, N]`.
    """
    returns, valid = at_least_float32(returns).reshape(-1), mask.astype(bool).reshape(-1)
    group = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.uint32) // group_size, mask.shape)
    # Invalid steps stand in a state of their own, which no valid step shares.
    ids = state_numbers((group, mask.astype(jnp.uint32), state), mask.size)

    def over_visits(function, x):
        return function(x, ids, ids.size)[ids]

    sizes = jnp.abs(returns) if sizes is None else jnp.broadcast_to(at_least_float32(sizes), mask.shape).reshape(-1)
    excess = jnp.where(valid, returns - over_visits(jax.ops.segment_min, returns), 0.0)
    span, size = (over_visits(jax.ops.segment_max, x) for x in (excess, sizes))
    excess = jnp.where(above_rounding(span, size) == 0, 0.0, excess)
    visits = over_visits(jax.ops.segment_sum, jnp.ones_like(excess))
    deviations = excess - over_visits(jax.ops.segment_sum, excess) / visits
    if normalize:
        squares = over_visits(jax.ops.segment_sum, jnp.square(deviations))
        deviations /= jnp.sqrt(squares / jnp.maximum(visits - ddof, 1)) + eps
    return jnp.where(valid, deviations, 0.0).reshape(mask.shape)


def same_turn_advantage(
    rewards: jax.Array,
    tokens: jax.Array,
    acted: jax.Array,
    group_size: int,
    *,
    discount: float,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """The step term of GiGPO for texts: of turns of a group that begin after exactly the same text.

        A_t^i = (R_k^i - mean(R)) / (std(R) + eps),  R_k = sum_{l >= k} discount^(l - k) r_l,  t in turn k

    over all turns of the group that begin after the same tokens; r_l is the sum of the rewards from the start of turn l
    to the next turn's. A turn is what the policy writes until the task answers. One after a text that no other member
    wrote gets exactly 0; the first turn, after the prompt, compares all members.

    Args:
      rewards: `[T, N]`, 0 after the end of the text.
      tokens: int `[T, N]`, the token that was read before each step; members of a group share the prompt.
      acted: bool `[T, N]`, true where the policy wrote the token, false where the task did, and after the end.
      discount: per turn, in [0, 1].
      group_size: members of a group; divides `N`. Static.
      sizes: as of `same_state_advantage`.

    Returns:
      `[T, N]`, the same at each token of a turn, 0 where the policy did not act.
    """
    acted = acted.astype(bool)
    starts = acted & ~jnp.roll(acted, 1, axis=0).at[0].set(False)
    decay = jnp.where(jnp.roll(starts, -1, axis=0), discount, 1.0)  # between two turns, not within one

    def add(later, now):
        total = now[0] + now[1] * later
        return total, total

    rewards = at_least_float32(rewards)
    returns = jax.lax.scan(add, jnp.zeros_like(rewards[0]), (rewards, decay), reverse=True)[1]
    of_turn = same_state_advantage(returns, prefix_hashes(tokens), starts, group_size, sizes=sizes)
    start = jax.lax.cummax(jnp.where(starts, jnp.arange(len(starts))[:, None], 0), axis=0)
    return jnp.where(acted, jnp.take_along_axis(of_turn, start, axis=0), 0.0)


class GigpoHyperparams(Hyperparams):
    """With the number of `gigpo_advantage`."""

    step_advantage_coef: float = number(1.0)
    """Weight of GiGPO's comparison of steps in the same state, beside that of whole rollouts."""


@dataclasses.dataclass(frozen=True, repr=False)
class _GiGPO:
    bin_width: float | tuple[float, ...] | None

    def __call__(self, trajectory: Trajectory, hyperparams: GigpoHyperparams, group_size: int) -> jax.Array:
        scores = episode_scores(trajectory, group_size)
        normalized = group_normalized(scores, ddof=hyperparams.score_ddof, eps=hyperparams.score_eps)
        step = self._step_term(trajectory, hyperparams, group_size)
        return jnp.where(trajectory.valid, normalized.reshape(1, -1) + hyperparams.step_advantage_coef * step, 0.0)

    def _step_term(self, trajectory, hyperparams, group_size):
        observation = trajectory.observation
        sizes = jnp.sum(jnp.abs(trajectory.reward), axis=0, where=trajectory.valid)
        if self.bin_width is not None:
            observation = self._binned(observation)
        if isinstance(trajectory.carry, TokenCarry):
            turns = trajectory.reward, observation, trajectory.acted, group_size
            return same_turn_advantage(*turns, discount=hyperparams.discount, sizes=sizes)
        returns = returns_to_go(trajectory, hyperparams, group_size)
        return same_state_advantage(returns, observation, trajectory.valid, group_size, sizes=sizes)

    def _binned(self, observation):
        width = jnp.array(self.bin_width)
        continuous = [x for x in jax.tree.leaves(observation) if jnp.issubdtype(x.dtype, jnp.floating)]
        if not continuous:
            raise ValueError(
                f"{self} is for continuous observations, but here all are whole numbers, which are compared exactly; "
                "write gigpo_advantage()"
            )
        for leaf in continuous:
            if width.ndim and leaf.shape[-1:] != width.shape:
                raise ValueError(
                    f"{self} has {width.size} widths, but an observation has shape {leaf.shape[2:]}; write one number "
                    "for all its elements, or one for each element of its last axis"
                )

        def bins(leaf):
            is_continuous = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jnp.floor(at_least_float32(leaf) / width) if is_continuous else leaf

        return jax.tree.map(bins, observation)

    def __repr__(self) -> str:
        return f"gigpo_advantage({'' if self.bin_width is None else f'bin_width={self.bin_width}'})"


def gigpo_advantage(bin_width: float | tuple[float, ...] | None = None) -> _GiGPO:
    """GiGPO's advantage: of the rollout in its group, plus that of the step among visits to the same state.

        A_t^i = A^E_i + step_advantage_coef A^S(s_t^i, a_t^i)

    https://arxiv.org/abs/2505.10978. A^E is GRPO's advantage. The state is the observation, by its bits, and A^S is
    `same_state_advantage` of the discounted returns-to-go. For a transformer, which has read the whole text, it is
    `same_turn_advantage`.

    Args:
      bin_width: continuous observations are the same state in the same bins of this width, in their units: a number, or
        one for each element of the last axis; None: only if all bits are equal. Whole numbers are compared exactly.

    Returns:
      A function for the slot `advantage`. It raises ValueError if the widths do not fit the observation.

    Raises:
      ConfigError: a width is not a positive, finite number.
    """
    widths = () if bin_width is None else np.ravel(np.asarray(bin_width, np.float64))
    if not all(0 < width < np.inf for width in widths):
        raise ConfigError(
            f"bin_width={bin_width} must be positive and finite, as it divides observations into bins; write for "
            "example bin_width=0.1 in their units, or leave it out, so that only equal observations are the same state"
        )
    return _GiGPO(tuple(widths.tolist()) if np.ndim(bin_width) else bin_width)
