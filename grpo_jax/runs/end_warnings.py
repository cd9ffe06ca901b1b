"""What went wrong in a run as a whole, as its end shows."""

import numpy as np

from grpo_jax.config import Config
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.runs.result import RunResult

PAGE = "`grpo-jax docs flat_reward` says more."
"""The end of each warning of what is not learnt."""
MOST_SKIPPED, MOST_LEFT = 0.01, 0.05
"""The largest parts of the updates that may be skipped, and of a budget that may be left."""

MESSAGES = {
    "skipped": "{skipped:.0f} of {updates} updates were skipped, as their loss or gradient was not finite. Look for "
    f"NaN and inf in rewards, observations and slots of your own, or try a lower learning_rate. {PAGE}",
    "episodes": "No episode ended, so final_return is NaN: each environment made {steps:.0f} steps, and is_truncated "
    "ends an episode after {limit}. Use a larger total_steps, fewer num_envs, or a lower limit in env_params.",
    "budget": "{left:.0%} of total_steps={total_steps:.0f} are left, as another iteration would exceed it: schedules, "
    "such as the learning rate's, did not reach their end. Write num_iterations={made}, which is used up, in place of "
    "total_steps; or fewer num_envs.",
}


def end_warnings(config: Config, hyperparams: Hyperparams, result: RunResult) -> dict[str, str]:
    """The messages of what one row or more show, by kind; of a result without iterations none."""
    if not len(result.steps):
        return {}
    made = (result.metrics["environment/steps"] > 0).sum(axis=0)
    numbers = {
        "made": made,
        "updates": made * config.num_epochs * config.num_minibatches,
        "skipped": np.nansum(result.metrics["optim/skipped_updates"], axis=0),
        "steps": result.steps[-1] / config.num_envs,
        "left": 1 - result.used,
        "total_steps": np.broadcast_to(hyperparams.total_steps, made.shape),
    }
    problems = {
        "skipped": numbers["skipped"] > MOST_SKIPPED * numbers["updates"],
        "episodes": ~(result.metrics["episode/count"] > 0).any(axis=0),
        "budget": (result.ended_by == "total_steps") & (numbers["left"] > MOST_LEFT),
    }
    first = {kind: np.argmax(rows) for kind, rows in problems.items() if rows.any()}
    limit = config.env.max_steps
    return {
        kind: MESSAGES[kind].format(limit=limit, **{name: each[row] for name, each in numbers.items()})
        for kind, row in first.items()
    }
