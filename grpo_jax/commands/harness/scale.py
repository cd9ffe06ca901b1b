"""The size of the machine: the tuned settings suit a CPU, and `for_gpu` makes those of a GPU or a TPU from them.

A GPU starts as many programs for a step of 4,096 environments as of 32, and for a gradient step of 4,096 samples as of
256, so it wants few and large ones. Large iterations are few, though, and a policy needs some number of them.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax

from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm
from grpo_jax.environments import make_environment
from grpo_jax.environments.suites import SUITES
from grpo_jax.policies import MLP

Scale = Literal["auto", "cpu", "gpu"]
SHORTEST_ROLLOUT = 16
"""Steps over which generalised advantage estimation still sees rewards beside the critic's last value."""
MORE_ITERATIONS = 4
"""Times those of the tuned budget, before iterations grow: fewer learn less."""
MOST_SAMPLES = 4096 * SHORTEST_ROLLOUT
"""Of an iteration of environments that continue."""
MOST_GROWTH = 8
"""Of the number of environments that play whole episodes, whose tuned numbers suit the lengths of the episodes."""
DEFAULTS = {
    "num_envs": Config.num_envs,
    "num_minibatches": Config.num_minibatches,
    "num_steps": 128,  # of environments that continue, as in `Config`
    "recurrent": MLP.recurrent,
    "learning_rate": Hyperparams.learning_rate,
    "total_steps": Hyperparams.total_steps,
}
"""Of fields that the settings do not have."""
KEPT_SUITES = ("tokens", "gymnasium")
"""Language tasks, whose settings are for 512 completions, and environments that the host steps."""


def resolve_scale(scale: Scale) -> Scale:
    """ "cpu" or "gpu", which "auto" is on every backend but a CPU."""
    return ("cpu" if jax.default_backend() == "cpu" else "gpu") if scale == "auto" else scale


def can_grow(environment: str) -> bool:
    """Whether more environments cost a GPU little: not those on the host, nor tasks with a prompt."""
    suite, colon, _ = environment.partition(":")
    if not colon or suite in SUITES:
        return suite not in KEPT_SUITES
    made = make_environment(environment)
    return made.prompt is None and not made.on_host


def for_gpu(
    fields: Mapping[str, Any], algorithm: Algorithm, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The fields for a GPU, from those tuned for a CPU and those that the user gives, which stay.

    An iteration has `growth` times as many samples as the tuned one, so that a longer training has no fewer iterations:

        growth = the largest power of 2 up to total_steps / (4 * tuned total_steps)

    - Environments that continue: at most 4,096 × 16 samples, of rollouts that are shorter by this factor, but of at
      least 16 steps; recurrent policies and groups keep the length of theirs.
    - Whole episodes: `growth` times as many environments, at most 8 times.
    - The number of minibatches stays, and the learning rate grows with the fourth root of their size: with the square
      root, usual for Adam, a seed in four of Pendulum was lost (experiments/results/scale).

    Args:
      fields: see `settings`.
      algorithm: its `start` tells whether environments continue or play whole episodes.
      given: any fields of `Config` and `Hyperparams`; sizes and the budget among them also change the others.
    """
    tuned = DEFAULTS | fields
    num_envs, steps, budget = tuned["num_envs"], tuned["num_steps"], given.get("total_steps", tuned["total_steps"])
    growth = budget / (MORE_ITERATIONS * tuned["total_steps"]) if math.isfinite(budget) else 1
    if algorithm.start.auto_reset:
        samples = num_envs * steps
        growth = _power_of_two(min(growth, MOST_SAMPLES / samples))
        samples *= growth
        keeps_steps = algorithm.start.grouped or (tuned | given)["recurrent"] != "none"
        shortest = steps if keeps_steps else min(SHORTEST_ROLLOUT, steps)
        length = given.get("num_steps", max(shortest, steps // growth))
        num_envs *= _power_of_two(min(samples, MOST_SAMPLES) / length / num_envs)
        fitting = samples // given.get("num_envs", num_envs) // shortest * shortest
        sizes = {"num_envs": num_envs, "num_steps": min(steps, max(shortest, fitting))}
    else:
        sizes = {"num_envs": num_envs * _power_of_two(min(growth, MOST_GROWTH))}
    rate = tuned["learning_rate"] * (_minibatch_size(tuned | sizes | given) / _minibatch_size(tuned)) ** 0.25
    return {**fields, **sizes, "learning_rate": float(f"{rate:.2g}"), **given}


def _power_of_two(limit: float) -> int:
    """The largest one up to the limit, at least 1."""
    return 1 << max(0, math.floor(math.log2(limit)))


def _minibatch_size(fields: Mapping[str, Any]) -> float:
    return fields["num_envs"] * fields["num_steps"] / fields["num_minibatches"]
