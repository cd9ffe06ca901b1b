"""What went wrong in a run as a whole, as its end shows."""

import numpy as np

from grpo_jax.config import Config
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.runs.result import RunResult

PAGE = "`grpo-jax docs flat_reward` says more."
"""The end of each warning of what is not learnt."""
MOST_LEFT = 0.05
"""The largest part of a budget that may be left."""


def end_warnings(config: Config, hyperparams: Hyperparams, result: RunResult) -> dict[str, str]:
    """By kind: "skipped", most updates were; "episodes", none ended; "budget", a part of total_steps is left.

    A kind is found if one row has it. Of a result without iterations nothing is said.
    """
    found: dict[str, str] = {}
    if not len(result.steps):
        return found
    made = (result.metrics["environment/steps"] > 0).sum(axis=0)
    skipped = np.nansum(result.metrics["optim/skipped_updates"], axis=0)
    updates = made * config.num_epochs * config.num_minibatches
    if (skipped > 0.5 * updates).any():
        row = np.argmax(skipped / np.maximum(updates, 1))
        found["skipped"] = (
            f"{skipped[row]:.0f} of {updates[row]} updates were skipped, as their loss or gradient was not finite. Look"
            f" for NaN and inf in rewards, observations and slots of your own, or try a lower learning_rate. {PAGE}"
        )
    if (nothing := np.isnan(result.final_return)).any():
        steps, limit = result.steps[-1][nothing].max() // config.num_envs, config.env.max_steps
        found["episodes"] = (
            f"No episode ended, so final_return is NaN: each environment made {steps} steps, and the limit of "
            f"{config.env.name} is {limit}. "
        )
        found["episodes"] += (
            "Its is_truncated must be True at the limit."
            if steps > limit
            else "Use a larger total_steps, fewer num_envs, or a lower max_steps_in_episode in env_params."
        )
    left = np.where(result.ended_by == "total_steps", 1 - result.used, 0.0)
    if left.max() > MOST_LEFT:
        row = np.argmax(left)
        total_steps = np.broadcast_to(hyperparams.total_steps, left.shape)[row]
        last = result.metrics["environment/steps"][made[row] - 1, row]
        found["budget"] = (
            f"{left[row]:.0%} of total_steps={total_steps:.0f} are left, as another iteration, of {last:.0f} steps,"
            " would exceed it: schedules, such as the learning rate's, did not reach their end. "
            f"Write num_iterations={made[row]}, which is used up, in place of total_steps; or fewer num_envs."
        )
    return found
