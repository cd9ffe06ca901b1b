"""Host: what goes wrong in training, told once while it does, with what to try."""

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.spaces import ActionSpace, Box, Discrete
from grpo_jax.policies.distributions import diagonal_gaussian

ENTROPY_FRACTION = 0.01
"""Of the largest entropy of discrete actions, or of the initial standard deviation of real ones: a collapse below."""
KL_LIMIT = 1.0
"""Nats between the policies before and after an iteration: an explosion above."""
DEAD_ITERATIONS = 10
"""In a row, all groups without a difference in score and no advantages: nothing is being learnt."""

MESSAGES = {
    "skipped": "An update was skipped, as its loss or gradient was not finite, {where}. Try --debug-nans, which shows "
    "the operation it comes from; a lower learning_rate; normalize_rewards or reward_clip, if rewards are large.",
    "entropy": "The policy's entropy has collapsed {where}: it hardly explores. If its return could be better, try a "
    "higher entropy_coef, or a lower learning_rate.",
    "kl": f"An iteration moved the policy by more than {KL_LIMIT:g} nat of KL {{where}}: its later updates learn from "
    "data that is no longer its own. Try a lower learning_rate, fewer num_epochs, or kl_limit=0.05.",
    "dead": f"All members of each group had equal scores for {DEAD_ITERATIONS} iterations {{where}}: nothing is learnt "
    "from them. If their return could be better, try a larger group_size, a higher entropy_coef, or a reward that "
    "tells failures apart.",
}


class Alarms:
    """Watches the metrics of one run; each kind of trouble is told once.

    Args:
      action_space: of the environment; it says what a collapsed entropy is.
    """

    def __init__(self, action_space: ActionSpace):
        self._entropy_floor = _entropy_floor(action_space)
        self._dead: np.ndarray | int = 0  # [num_seeds] iterations in a row
        self._told: set[str] = set()

    def watch(self, iteration: int, metrics: Mapping[str, np.ndarray]) -> list[str]:
        """What is new in a chunk.

        Args:
          iteration: index of the first row.
          metrics: each `[n, num_seeds]`, by name; NaN where there is none.
        """
        found = []
        for kind, trouble in self._troubles(metrics).items():
            rows = np.flatnonzero(trouble.any(axis=1))
            if kind not in self._told and len(rows):
                self._told.add(kind)
                where = f"at iteration {iteration + rows[0]}"
                if trouble.shape[1] > 1:
                    where += f" in seeds {listed(np.flatnonzero(trouble[rows[0]]))}"
                found.append(MESSAGES[kind].format(where=where))
        return found

    def _troubles(self, metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Where there is which, each `[n, num_seeds]`."""
        troubles = {}
        if "optim/skipped_updates" in metrics:
            troubles["skipped"] = metrics["optim/skipped_updates"] > 0
        if "policy/entropy" in metrics:
            troubles["entropy"] = metrics["policy/entropy"] < self._entropy_floor
        if "policy/kl_behaviour" in metrics:
            troubles["kl"] = metrics["policy/kl_behaviour"] > KL_LIMIT
        if "group/zero_variance_fraction" in metrics:
            in_a_row = []
            # A baseline of states learns from members of equal scores too: then advantages are not 0.
            for dead in (metrics["group/zero_variance_fraction"] == 1) & ~(metrics["advantage/abs_mean"] > 0):
                self._dead = np.where(dead, self._dead + 1, 0)
                in_a_row.append(self._dead)
            troubles["dead"] = np.array(in_a_row) >= DEAD_ITERATIONS
        return troubles


def _entropy_floor(space: ActionSpace) -> float:
    """In nats; of real actions, that of a Gaussian."""
    if isinstance(space, Box):
        gaussian = diagonal_gaussian(space.low, space.high)
        initial = float(gaussian.entropy(jnp.zeros(gaussian.num_parameters)))
        return initial + len(space.low) * math.log(ENTROPY_FRACTION)
    sizes = (space.num_actions,) if isinstance(space, Discrete) else space.num_actions
    return ENTROPY_FRACTION * sum(math.log(size) for size in sizes)


def listed(seeds: Sequence[int]) -> str:
    """The first ten, and how many more."""
    shown = ", ".join(str(seed) for seed in seeds[:10])
    return f"[{shown}, and {len(seeds) - 10} more]" if len(seeds) > 10 else f"[{shown}]"
