"""The algorithm that the name "auto" stands for."""

import math
from typing import NamedTuple

LONGEST_CHEAP_EPISODE = 500
"""Steps of the longest episode that one-episode groups are chosen for."""
FEWEST_EPISODES = 500
"""Whole episodes that a budget must allow where one-episode groups are chosen."""


class Choice(NamedTuple):
    """An algorithm and why it was chosen."""

    name: str
    reason: str


def automatic_algorithm(max_steps: int, total_steps: float = math.inf) -> Choice:
    """The algorithm for an episode limit and a budget of environment steps.

    "grpo" if whole episodes are cheap: the limit is at most 500 steps, and the budget allows 500 episodes of that
    length. Its groups then compare the outcomes of whole episodes, without a critic.

    Otherwise "ppo". An iteration of whole episodes would take a large part of the budget, and the outcome of an episode
    says little about one of its many actions. PPO learns from parts of episodes. So do some methods without a critic,
    but PPO scored higher than those on three of four MinAtar games.

    Args:
      max_steps: the environment's episode limit.
      total_steps: the budget; infinity if unknown.
    """
    if max_steps > LONGEST_CHEAP_EPISODE:
        return Choice("ppo", f"episodes of up to {max_steps} steps are too long to play whole")
    if max_steps * FEWEST_EPISODES > total_steps:
        return Choice("ppo", f"{total_steps:g} steps allow fewer than {FEWEST_EPISODES} episodes of {max_steps}")
    return Choice("grpo", f"whole episodes are cheap: at most {max_steps} steps")
