"""What suits each token task."""

from typing import NamedTuple


class TokenTask(NamedTuple):
    """The length of training and the warm start of a token task."""

    total_steps: int  # tokens that each seed may sample
    target: float  # sampled accuracy at which the warm start ends
    learning_rate: float = 5e-4  # of the warm start


TASKS = {
    "sort": TokenTask(total_steps=1_000_000, target=0.5),
    "addition": TokenTask(total_steps=2_500_000, target=0.7, learning_rate=3e-3),
    "calculator": TokenTask(total_steps=1_000_000, target=0.1, learning_rate=1e-3),
    "countdown": TokenTask(total_steps=2_500_000, target=0.4, learning_rate=3e-3),
}
"""By the name without the size."""
OTHERS = TokenTask(total_steps=4_000_000, target=0.5, learning_rate=1e-3)
REWARD_HACKING = TokenTask(total_steps=200_000, target=0.02)
"""A warm start so short that most groups contain no right answer, so that a reward for the format dominates."""


def token_task(task: str) -> TokenTask:
    """For the name of a task, such as "sort-5"."""
    return TASKS.get(task.partition("-")[0], OTHERS)
