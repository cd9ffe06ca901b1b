"""The picture of a group that starts in mid-episode, `docs/group.png`: `python docs/site/group.py`."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

sys.path.insert(0, str(Path(__file__).parents[2]))
matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

from grpo_jax import Config, Hyperparams, run  # noqa: E402
from grpo_jax.groups import copy_to_members  # noqa: E402
from grpo_jax.objectives import group_normalized  # noqa: E402
from grpo_jax.rollouts.rollout import Simulator  # noqa: E402

NUM_STEPS, GROUP_SIZE = 40, 8
BAD, GOOD = "#c8553d", "#2a7f9e"


def main(seed: int = 3) -> None:
    """A trunk of one environment, and the futures of copies of its last state."""
    config = Config(algorithm="ppo", num_envs=32, num_steps=32, num_minibatches=4)
    keys = jax.random.split(jax.random.key(seed), 3)
    trained = run(config, Hyperparams(total_steps=12_000), keys[:1]).states
    simulator = Simulator(config.env, config.policy, jax.tree.map(lambda leaf: leaf[0], trained.params))
    params = jax.tree.map(lambda leaf: leaf[0, :1], trained.rollout.environment_params)
    start = simulator.reset(params, keys[1], 1)
    state, trunk = simulator.unroll(start, keys[1], num_steps=NUM_STEPS, auto_reset=False)
    group = copy_to_members(state, GROUP_SIZE)  # bitwise copies: environment, observation, memory of the policy
    end, futures = simulator.unroll(group, keys[2], num_steps=200, auto_reset=False)
    draw(trunk, futures, group_normalized(end.episode_return[None])[0])


def draw(trunk, futures, advantages) -> None:
    """The angle of the pole over time: the trunk, and each member in the colour of its advantage."""
    figure, axis = plt.subplots(figsize=(6.4, 2.9), layout="constrained")
    degrees = 180 / jnp.pi
    axis.plot(jnp.arange(NUM_STEPS), trunk.observation[:, 0, 2] * degrees, color="black", linewidth=2)
    for member in range(GROUP_SIZE):
        valid = futures.valid[:, member]
        angle = futures.observation[valid, member, 2] * degrees
        steps = NUM_STEPS + jnp.arange(len(angle))
        colour = GOOD if advantages[member] > 0 else BAD
        axis.plot(steps, angle, color=colour, alpha=0.8)
        label = f"{advantages[member]:+.1f}".replace("-0.0", "0.0")
        axis.annotate(label, (steps[-1] + 1, angle[-1]), color=colour, fontsize=8)
    axis.plot(NUM_STEPS, futures.observation[0, 0, 2] * degrees, "o", color="black", zorder=3)
    axis.set_xlabel("environment step")
    axis.set_ylabel("angle of the pole (degrees)")
    axis.set_title("one state in mid-episode, eight futures, and their advantages", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parents[1] / "group.png", dpi=160)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
