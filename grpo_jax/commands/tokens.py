"""GRPO as in the training of language models, on small tasks: `grpo-jax tokens --task sort-5`."""

import dataclasses
import functools
from typing import Any

import jax

from grpo_jax import Config, Hyperparams, objectives
from grpo_jax.algorithms import by_name
from grpo_jax.commands.harness.command import command, need_one_process
from grpo_jax.commands.harness.limits import OutFile, Seeds, Share, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.settings import REWARD_HACKING, TokenTask, settings, split_fields, token_task
from grpo_jax.commands.harness.study import Study, StudyArguments
from grpo_jax.commands.harness.token_runs import (
    EXACT_MATCH,
    AccuracyCurves,
    load_or_make_warm_start,
    params_from_warm_start,
    plot_accuracies,
    prompted,
    show_samples,
)
from grpo_jax.environments.tokens import ACCURACY, FORMAT, Task, accuracy, gated, make_task, well_formed
from grpo_jax.errors import ConfigError
from grpo_jax.recording.run_spec import RunSpec


@dataclasses.dataclass
class Arguments(StudyArguments):
    """A warm start on solutions, then training by rewards, evaluated on held-out prompts."""

    task: str = "sort-5"
    """Name of a token task, such as addition-2 or countdown-3."""
    algorithm: str = "grpo"
    """Name of the algorithm."""
    compare: bool = False
    """Compare algorithms, group sizes, clip widths and KL coefficients, at equal numbers of sampled tokens."""
    reward_hacking: bool = False
    """Add a small reward for the format: how it takes over from that for the right answer, and what prevents that."""
    values: bool = False
    """Compare where the advantages of tokens come from: groups, a critic, Monte Carlo values."""
    variety: bool = False
    """Compare what keeps the variety of answers: an entropy bonus, KL penalties, clip-higher, pass@k."""
    num_seeds: Seeds = 5
    """Independent runs, each with its own warm start."""
    total_steps: Steps | None = None
    """Tokens that each seed may sample; the task's setting if left out."""
    target: Share | None = None
    """Sampled accuracy at which the warm start ends; the task's setting if left out."""
    warm_start: OutFile | None = None
    """File of a warm start that runs share: read if it exists, written if not; --out keeps a copy."""


def task_settings(arguments: Arguments) -> TokenTask:
    return REWARD_HACKING if arguments.reward_hacking else token_task(arguments.task)


def make_plan(
    arguments: Arguments,
    label: str,
    algorithm: str = "grpo",
    variant: dict[str, Any] | None = None,
    task: Task | None = None,
    **changes,
) -> RunSpec:
    """A run on the task with the tuned settings, except for those changes, and for a variant of the algorithm's slots.

    Rollouts begin with a prompt, and the warm start is the frozen reference, unless the algorithm has no KL penalty.
    """
    environment = f"tokens:{arguments.task}"
    static, traced = split_fields(environment, settings(environment, algorithm) | changes)
    slot_values = prompted(by_name(algorithm)._replace(**variant or {}))
    total_steps = task_settings(arguments).total_steps if arguments.total_steps is None else arguments.total_steps
    config = Config(environment=task or environment, algorithm=slot_values, **static)
    return RunSpec(label, config, Hyperparams(total_steps=total_steps, **traced), arguments.training_keys)


def comparison(arguments: Arguments) -> list[RunSpec]:
    """Algorithms, and GRPO with one setting changed at a time."""
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


def reward_hacking(arguments: Arguments) -> list[RunSpec]:
    """Rewards for the right answer alone, with one for the format added, and three ways to add that safely."""
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


def sources_of_values(arguments: Arguments) -> list[RunSpec]:
    """Advantages of completions by groups, and of tokens by a critic or by branches.

    Without groups, each completion has its own prompt. "Mean of all" has as many prompts but no values
    of tokens, and so separates the effects of prompts and values.
    """
    plan = functools.partial(make_plan, arguments)
    return [
        plan("GRPO"),
        plan("RLOO", "rloo"),
        plan("mean of all", "reinforce_plus_plus", group_size=1),
        plan("PPO", "ppo"),
        plan("Monte Carlo", "vine_ppo"),
    ]


def keeping_variety(arguments: Arguments) -> list[RunSpec]:
    """GRPO, and what may keep its answers from becoming alike."""
    plan = functools.partial(make_plan, arguments)
    return [
        plan("GRPO"),
        plan("entropy bonus 0.01", entropy_coef=0.01),
        plan("KL coefficient 0.1", kl_coef=0.1),
        plan("clip-higher 0.5", clip_high=0.5),
        plan("pass@k", "pass_at_k"),
    ]


COMPARISONS = {
    "compare": (comparison, ("greedy", "sampled")),
    "reward_hacking": (reward_hacking, ("sampled", "well_formed")),
    "values": (sources_of_values, ("greedy", "sampled")),
    "variety": (keeping_variety, ("sampled", "pass_at_8")),
}
"""By the flag: the plans, and the accuracies that are drawn."""


def main(arguments: Arguments) -> None:
    need_one_process("warm starts and accuracies")
    chosen = [name for name in COMPARISONS if getattr(arguments, name)]
    if len(chosen) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in chosen)
        raise ConfigError(f"{flags} are several experiments; run one after the other")
    if chosen:
        make_plans, names = COMPARISONS[chosen[0]]
        plans = make_plans(arguments)
    else:
        plans = [make_plan(arguments, arguments.algorithm, arguments.algorithm)]
        names = ("greedy", "sampled", "pass_at_8")
    study = Study("tokens", plans, arguments, score=EXACT_MATCH)
    key_start, key_samples, key_accuracies = jax.random.split(jax.random.fold_in(jax.random.key(arguments.seed), 1), 3)
    keys = jax.random.split(key_start, arguments.num_seeds)
    config = Config(environment=plans[0].config.environment)
    start = load_or_make_warm_start(
        config,
        keys,
        target=task_settings(arguments).target if arguments.target is None else arguments.target,
        learning_rate=task_settings(arguments).learning_rate,
        paths=[study.out / "warm_start.msgpack", *filter(None, [arguments.warm_start])],
        console=study.console,
    )

    def show(when, params):
        show_samples(config, jax.tree.map(lambda leaf: leaf[0], params), key_samples, study.console, when=when)

    show("after the warm start", start.params)
    accuracies = AccuracyCurves(study.out, key_accuracies)
    trained, *_ = study.run_all(lambda config: params_from_warm_start(config, start.params["actor"], keys), accuracies)
    if plans[0].config.algorithm.critic is None:
        show("after training", trained.params)
    title = f"{plans[0].config.env.name}: median of {arguments.num_seeds} seeds, each faint"
    plot_accuracies(accuracies.curves, names, title, study.out)
    study.finish()
    study.console.print(f"Accuracies during training: accuracy.json and accuracy.png in {study.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
