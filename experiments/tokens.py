"""GRPO as language models use it, on small tasks: `python -m experiments.tokens --task sort-5`."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.harness.command import command
from experiments.harness.runs import Plan
from experiments.harness.settings import REWARD_HACKING, TokenTask, settings, token_task
from experiments.harness.study import Study, StudyArguments
from experiments.harness.token_runs import EXACT_MATCH, Watch, as_started, plot_accuracies, show_samples, warm_started
from grpo_jax import Config, Hyperparams, objectives
from grpo_jax.algorithms import by_name, with_reference
from grpo_jax.environments.tokens import ACCURACY, FORMAT, Task, accuracy, gated, make_task, well_formed
from grpo_jax.errors import ConfigError
from grpo_jax.rollouts.starts import FRESH


@dataclasses.dataclass
class Arguments(StudyArguments):
    """A warm start on solutions, then reinforcement by rewards, measured on prompts that neither has seen."""

    task: str = "sort-5"
    """One of grpo_jax.environments.tokens, such as addition-2 or countdown-3."""
    algorithm: str = "grpo"
    """Name of the algorithm."""
    compare: bool = False
    """Other algorithms, group sizes, clip widths and KL coefficients, at equal numbers of sampled tokens."""
    reward_hacking: bool = False
    """A small reward for the format beside the one for the right answer: how it takes over, and what prevents that."""
    num_seeds: int = 5
    """Independent runs, each from a warm start of its own."""
    total_steps: int | None = None
    """Tokens that each seed may sample; what suits the task if left out."""
    target: float | None = None
    """Sampled accuracy at which the warm start ends; what suits the task if left out."""
    warm_start: Path | None = None
    """File of a warm start that runs share: read if there is one, written if not; --out keeps a copy."""


def preparation(arguments: Arguments) -> TokenTask:
    """How long to train and to warm up."""
    return REWARD_HACKING if arguments.reward_hacking else token_task(arguments.task)


def make_plan(
    arguments: Arguments,
    label: str,
    algorithm: str = "grpo",
    variant: dict[str, Any] | None = None,
    task: Task | None = None,
    **changes,
) -> Plan:
    """A run on the task with the settings of token tasks, some of them or of the algorithm's slots changed.

    Rollouts begin with a prompt, and the warm start is the frozen reference, unless the algorithm has no KL penalty.
    """
    fields = settings(f"tokens:{arguments.task}", algorithm) | changes
    of_config = {name: value for name, value in fields.items() if name in Config.__dataclass_fields__}
    of_hyperparams = {name: value for name, value in fields.items() if name not in of_config}
    started = by_name(algorithm)._replace(start=FRESH, **variant or {})
    if objectives.kl_to_behaviour in started.penalties or started.critic is not None:
        started = with_reference(started)
    total_steps = arguments.total_steps or preparation(arguments).total_steps
    config = Config(environment=task or f"tokens:{arguments.task}", algorithm=started, **of_config)
    return Plan(label, config, Hyperparams(total_steps=total_steps, **of_hyperparams))


def comparison(arguments: Arguments) -> list[Plan]:
    """Algorithms, and then GRPO at other settings, one at a time."""
    plan = functools.partial(make_plan, arguments)
    sizes = [size for size in (4, 8, 16, 32, 64, 128) if size != settings("tokens:", "grpo")["group_size"]]
    return [
        plan("GRPO"),
        plan("PPO, value head", "ppo", shared_critic=True),
        plan("PPO, critic apart", "ppo"),
        plan("RLOO", "rloo"),
        plan("Dr. GRPO", "dr_grpo"),
        plan("GSPO", "gspo"),
        plan("DAPO", "dapo", {"filter_overlong": True}),
        *(plan(f"groups of {size}", group_size=size) for size in sizes),
        *(plan(f"clip {width}", clip_low=width, clip_high=width) for width in (0.05, 0.1, 0.4)),
        *(plan(f"KL coefficient {coef:g}", kl_coef=coef) for coef in (0.0, 0.1, 1.0)),
    ]


def reward_hacking(arguments: Arguments) -> list[Plan]:
    """The right answer alone, a reward for the format added, and three ways to add it that do no harm."""
    task = make_task(arguments.task)
    added = task._replace(rewards=(ACCURACY, FORMAT))
    gate = task._replace(rewards=(ACCURACY._replace(function=gated(accuracy, well_formed)),))
    plans = {
        "accuracy alone": (task, {}),
        "format added": (added, {}),
        "format as a gate": (gate, {}),
        "format added, no std": (added, {"advantage": objectives.outcome(objectives.group_centered)}),
        "format added, decoupled": (
            added,
            {
                "advantage": objectives.outcome(
                    objectives.decoupled_normalized, objectives.reward_part_scores, objectives.reward_part_weights
                )
            },
        ),
    }
    return [make_plan(arguments, label, "grpo", variant, task) for label, (task, variant) in plans.items()]


def main(arguments: Arguments) -> None:
    if jax.process_count() > 1:
        raise ConfigError("warm starts and accuracies are of one process so far; leave --coordinator out")
    if arguments.compare and arguments.reward_hacking:
        raise ConfigError("--compare and --reward-hacking are two experiments; run one after the other")
    if arguments.compare:
        plans, shown = comparison(arguments), ("greedy", "sampled")
    elif arguments.reward_hacking:
        plans, shown = reward_hacking(arguments), ("sampled", "well_formed")
    else:
        plans = [make_plan(arguments, arguments.algorithm, arguments.algorithm)]
        shown = ("greedy", "sampled", "pass_at_8")
    study = Study("tokens", plans, arguments, score=EXACT_MATCH)
    key_start, key_shown, key_watch = jax.random.split(jax.random.fold_in(jax.random.key(arguments.seed), 1), 3)
    keys = jax.random.split(key_start, arguments.num_seeds)
    config = Config(environment=plans[0].config.environment)
    start = warm_started(
        config,
        keys,
        target=arguments.target or preparation(arguments).target,
        learning_rate=preparation(arguments).learning_rate,
        paths=[study.out / "warm_start.msgpack", *filter(None, [arguments.warm_start])],
        console=study.console,
    )

    def show(when, params):
        show_samples(config, jax.tree.map(lambda leaf: leaf[0], params), key_shown, study.console, when=when)

    show("after the warm start", start.params)
    watch = Watch(study.out, key_watch)
    trained, *_ = study.run_all(lambda config: as_started(config, start.params["actor"], keys), watch)
    if plans[0].config.algorithm.critic is None:
        show("after training", trained.params)
    name = plans[0].config.env.name
    plot_accuracies(watch.curves, shown, f"{name}: median of {arguments.num_seeds} seeds, each faint", study.out)
    study.finish()
    study.console.print(f"Along the runs: accuracy.json and accuracy.png in {study.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(tyro.cli(Arguments)))
