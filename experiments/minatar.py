"""Methods without a critic beside PPO on MinAtar: `python -m experiments.minatar`.

All methods take the same environment steps and updates with the same network. With `--tuning` each of them is tried
with the same eight settings; with `--ablations` it shows the effect of each part of the kernel baseline's recipe.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

from grpo_jax import Hyperparams
from grpo_jax.baselines import kernel_baseline, policy_features
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Seeds, Steps
from grpo_jax.commands.harness.parsing import chosen, parse_flags
from grpo_jax.commands.harness.settings import ON_RELATIVE_POSITIONS, make_plan
from grpo_jax.commands.harness.study import Study, StudyArguments
from grpo_jax.errors import ConfigError
from grpo_jax.groups import CONTINUE
from grpo_jax.recording.run_spec import RunSpec
from grpo_jax.sweeps.runs import sampled_return

GAMES = ("Breakout", "SpaceInvaders", "Asterix", "Freeway")


class Method(NamedTuple):
    """An algorithm, and its changes to the settings of the game and to the slots of the algorithm."""

    algorithm: str
    fields: dict[str, Any] = {}
    slots: dict[str, Any] = {}


PPO = Method("ppo", {"gae_lambda": 0.95})
"""With purejaxrl's lambda on all games."""

METHODS = {
    "PPO": PPO,
    "PPO, one network": Method(
        "ppo", {"shared_critic": True, "gae_lambda": 0.8, "learning_rate": 2.5e-3, "entropy_coef": 0.02}
    ),
    "kernel + GAE": Method("kernel_gae"),
    "same step": Method("same_step_gae"),
    "LSTD + GAE": Method("lstd_gae"),
    "recursive LSTD + GAE": Method("recursive_lstd_gae"),
    "LSTD on relative positions": Method("recursive_lstd_gae", slots={"baseline": ON_RELATIVE_POSITIONS}),
}
TRIED = {"gae_lambda": (0.8, 0.95), "learning_rate": (2.5e-3, 5e-3), "entropy_coef": (0.01, 0.02)}
"""The values that `--tuning` combines."""


def kernel(**options) -> Method:
    return Method("kernel_gae", slots={"baseline": kernel_baseline(**options)})


ABLATIONS = {
    "kernel + GAE": Method("kernel_gae"),
    "no groups": Method("kernel_gae", {"group_size": 1}, {"start": CONTINUE}),
    "groups of 2": Method("kernel_gae", {"group_size": 2}),
    "groups of 8": Method("kernel_gae", {"group_size": 8}),
    "regroup every 32": Method("kernel_gae", {"regroup_every": 32}),
    "windows of 32, 256 envs": Method("kernel_gae", {"num_steps": 32, "num_envs": 256}),
    "windows of 512, 16 envs": Method("kernel_gae", {"num_steps": 512, "num_envs": 16, "group_size": 8}),
    "lambda 0.8": Method("kernel_gae", {"gae_lambda": 0.8}),
    "lambda 1": Method("kernel_gae", {"gae_lambda": 1.0}),
    "bandwidth / 4": Method("kernel_gae", {"kernel_bandwidth": 0.25 * Hyperparams().kernel_bandwidth}),
    "bandwidth × 4": Method("kernel_gae", {"kernel_bandwidth": 4.0 * Hyperparams().kernel_bandwidth}),
    "standardised": kernel(standardize=True),
    "policy features": kernel(metric=policy_features),
    "neighbours in time": kernel(reach=1),
    "state hash": Method("state_hash"),
    "same step": Method("same_step_gae"),
    "same step, critic at the end": Method("same_step_critic"),
    "PPO": PPO,
}


@dataclasses.dataclass
class Arguments(StudyArguments):
    """Trains PPO and critic-free methods on MinAtar at equal environment steps."""

    games: tuple[str, ...] = GAMES
    """Names of the games."""
    total_steps: Steps = 5_000_000
    """Environment steps a seed may take."""
    num_seeds: Seeds = 5
    """Independent runs of each."""
    methods: tuple[str, ...] = ()
    """Names of the methods; all if left out."""
    gae_lambda: float | None = None
    """Lambda of all methods, in place of each one's own and of those that --tuning tries."""
    learning_rate: float | None = None
    """Learning rate of all methods, in the same way."""
    entropy_coef: float | None = None
    """Entropy coefficient of all methods, in the same way."""
    tuning: bool = False
    """Try each method with the same lambdas, learning rates and entropy coefficients; give it a --seed of its own."""
    ablations: bool = False
    """Vary one thing at a time, instead of comparing the methods; give it another --seed and fewer --total-steps."""


def main(arguments: Arguments) -> None:
    methods = methods_of(arguments)
    plans = [
        make_game_plan(arguments, game, label, method) for game in arguments.games for label, method in methods.items()
    ]
    study = Study("minatar", plans, arguments, score=sampled_return(64))
    study.run_all()
    study.finish()


def methods_of(arguments: Arguments) -> dict[str, Method]:
    """The methods that the command line asks for, by label, with the settings that it gives."""
    if arguments.ablations and (arguments.tuning or arguments.gae_lambda is not None):
        raise ConfigError("--tuning and --gae-lambda would replace the lambda of --ablations; leave them out")
    methods = chosen(ABLATIONS if arguments.ablations else METHODS, arguments.methods, "method")
    given = {name: getattr(arguments, name) for name in TRIED if getattr(arguments, name) is not None}
    if arguments.tuning:
        return trials(methods, TRIED | {name: (value,) for name, value in given.items()})
    return {label: method._replace(fields=method.fields | given) for label, method in methods.items()}


def trials(methods: dict[str, Method], tried: dict[str, tuple]) -> dict[str, Method]:
    """Each method with each combination of the values of fields, by its name and those values."""
    combinations = [dict(zip(tried, values, strict=True)) for values in itertools.product(*tried.values())]
    return {
        f"{label}: {' '.join(map(str, fields.values()))}": method._replace(fields=method.fields | fields)
        for label, method in methods.items()
        for fields in combinations
    }


def make_game_plan(arguments: Arguments, game: str, label: str, method: Method) -> RunSpec:
    plan = make_plan(
        f"{game}-MinAtar",
        method.algorithm,
        arguments.training_keys,
        total_steps=arguments.total_steps,
        label=label,
        **method.fields,
    )
    algorithm = plan.config.algorithm._replace(**method.slots)
    return plan._replace(config=dataclasses.replace(plan.config, algorithm=algorithm))


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
