"""Host: warnings of what goes wrong in training, each given once."""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from grpo_jax.environments.spaces import ActionSpace, Box, Discrete
from grpo_jax.policies.distributions import diagonal_gaussian
from grpo_jax.runs.end_warnings import PAGE
from grpo_jax.runs.run_spec import list_first

ENTROPY_FRACTION = 0.01
"""An entropy has collapsed below this part of the largest one; with real actions, of the initial standard deviation."""
KL_LIMIT = 1.0
"""The largest KL divergence, in nats, between the policies before and after an iteration that is not a problem."""
DEAD_ITERATIONS = 10
"""So many iterations in a row without a difference in score in any group, and without advantages, are a problem."""

LIMITS = {
    "skipped": ("optim/skipped_updates", 0),
    "diverged": ("environment/invalid_resets", 0),
    "kl": ("policy/kl_behaviour", KL_LIMIT),
}
"""By kind, a metric and the most of it that is not a problem."""

MESSAGES = {
    "skipped": "An update was skipped, as its loss or gradient was not finite, {where}. Try a lower learning_rate, or "
    "normalize_rewards if rewards are large.",
    "diverged": "The state of an environment became NaN or inf {where}: it is reset, and such steps are discarded. "
    "If they are many (environment/invalid_resets), look at the environment's time step or its actions.",
    "entropy": "The policy's entropy has collapsed {where}: it hardly explores. If its return could be better, "
    "try a higher entropy_coef, or a lower learning_rate.",
    "kl": f"An iteration moved the policy by more than {KL_LIMIT:g} nat of KL {{where}}: its later updates learn from "
    "data that is no longer its own. Try a lower learning_rate, fewer num_epochs, or kl_limit=0.05.",
    "dead": f"All members of each group had equal scores for {DEAD_ITERATIONS} iterations {{where}}: they teach "
    "nothing. If they could be better, try a larger group_size, or a reward that tells failures apart.",
}


class TrainingWarnings:
    """`(iteration, metrics) -> warnings` of one run; each kind of problem is reported once.

    What a collapsed entropy is depends on the action space. `word` is what rows are called: "seeds", or "rows" if they
    also differ in their settings.
    """

    def __init__(self, action_space: ActionSpace, word: str = "seeds"):
        self._entropy_floor, self._word = _entropy_floor(action_space), word
        self._dead: np.ndarray | int = 0  # [R] iterations in a row
        self._reported: set[str] = set()

    def __call__(self, iteration: int, metrics: Mapping[str, np.ndarray]) -> list[str]:
        """The new warnings of a chunk: metrics `[n, R]` from an iteration on, NaN once a row has ended."""
        warnings = []
        for kind, problem in self._problems(metrics).items():
            rows = np.flatnonzero(problem.any(axis=1))
            if kind not in self._reported and len(rows):
                self._reported.add(kind)
                where = f"at iteration {iteration + rows[0]}"
                if problem.shape[1] > 1:
                    where += f" in {self._word} {list_first(np.flatnonzero(problem[rows[0]]))}"
                warnings.append(f"{MESSAGES[kind].format(where=where)} {PAGE}")
        return warnings

    def _problems(self, metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """By kind, `[n, R]` bool: where it is found."""
        problems = {kind: metrics[name] > limit for kind, (name, limit) in LIMITS.items() if name in metrics}
        if "policy/entropy" in metrics:
            problems["entropy"] = metrics["policy/entropy"] < self._entropy_floor
        if "group/zero_variance_fraction" in metrics:
            in_a_row = []
            # With a baseline of states, members of equal scores may have advantages that are not 0.
            for dead in (metrics["group/zero_variance_fraction"] == 1) & ~(metrics["advantage/abs_mean"] > 0):
                self._dead = np.where(dead, self._dead + 1, 0)
                in_a_row.append(self._dead)
            problems["dead"] = np.array(in_a_row) >= DEAD_ITERATIONS
        return problems


def _entropy_floor(space: ActionSpace) -> float:
    """The entropy, in nats, below which it has collapsed; for real actions, a Gaussian's."""
    if isinstance(space, Box):
        gaussian = diagonal_gaussian(space.low, space.high)
        initial = float(gaussian.entropy(jnp.zeros(gaussian.num_parameters)))
        return initial + len(space.low) * math.log(ENTROPY_FRACTION)
    sizes = (space.num_actions,) if isinstance(space, Discrete) else space.num_actions
    return ENTROPY_FRACTION * sum(math.log(size) for size in sizes)
