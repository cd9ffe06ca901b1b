"""GRPO as in the training of language models, on small tasks: `python -m experiments.tokens --task sort-5`.

A warm start on solutions, then training by rewards, measured on held-out prompts.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from grpo_jax import FRESH, Config, TrainState, objectives, with_reference
from grpo_jax.algorithms import by_name
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.language_training import params_from_warm_start
from grpo_jax.commands.harness.limits import Seeds, Share, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.commands.harness.study import CommandStudy, StudyArguments
from grpo_jax.environments.tokens import ACCURACY, FORMAT, TASKS, accuracy, gated, make_task, well_formed
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.generation import answer
from grpo_jax.recording.figures import panels
from grpo_jax.recording.files import write_json
from grpo_jax.recording.statistics import pass_at_k
from grpo_jax.runs.imitation import warm_start
from grpo_jax.runs.progress import Chunk, Progress
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.runs.tuned import split_fields, without_unread
from grpo_jax.runs.tuned_settings import tuned_settings
from grpo_jax.sweeps.runs import Score
from grpo_jax.training.checks import check_one_process
from grpo_jax.types import PyTree

from .harness.countdown import countdown
from .harness.trainings import REWARD_HACKING, TokenTask, token_task

TASKS["countdown"] = countdown
HELD_OUT = {"held_out": 1}
NUM_FINAL, NUM_PROMPTS, NUM_SAMPLES, NUM_POINTS = 512, 64, 16, 20


@dataclasses.dataclass
class Arguments(StudyArguments):
    """A warm start on solutions, then training by rewards, evaluated on held-out prompts."""

    task: str = "sort-5"
    """Name of a token task, such as addition-2 or countdown-3."""
    algorithm: str = "grpo"
    """Name of the algorithm."""
    compare: Literal["nothing", "settings", "rewards", "values", "variety"] = "nothing"
    """settings: algorithms, group sizes, clip widths and KL coefficients; rewards: with one for the format, which may
    take over; values: where the advantages of tokens come from; variety: what keeps answers varied."""
    num_seeds: Seeds = 5
    """Independent runs, each with its own warm start."""
    total_steps: Steps | None = None
    """Tokens that each seed may sample; the task's setting if left out."""
    target: Share | None = None
    """Sampled accuracy at which the warm start ends; the task's setting if left out."""

    @property
    def chosen(self) -> TokenTask:
        tuned = REWARD_HACKING if self.compare == "rewards" else token_task(self.task)
        given = {"total_steps": self.total_steps, "target": self.target}
        return tuned._replace(**{name: value for name, value in given.items() if value is not None})


def make_plan(
    arguments: Arguments, label: str, algorithm: str, slots: Any = (), task: Any = None, **changes
) -> RunSpec:
    """A run with the tuned settings but for some changes; rollouts begin with a prompt."""
    environment = f"tokens:{arguments.task}"
    static, traced = split_fields(environment, tuned_settings(environment, algorithm) | changes)
    found = by_name(algorithm)._replace(start=FRESH, **dict(slots))
    has_values = found.critic is not None or found.baseline is not None
    if objectives.kl_to_behaviour in found.penalties or has_values:  # not DAPO's and others by design without KL
        found = with_reference(found)
    config = Config(environment=task or environment, algorithm=found, **static)
    traced["total_steps"] = arguments.chosen.total_steps
    hyperparams = without_unread(config, config.hyperparams_class(**traced), traced.keys() - changes.keys())
    return RunSpec(label, config, hyperparams, arguments.training_keys)


def make_plans(arguments: Arguments) -> list[RunSpec]:
    """What is compared, with the same number of sampled tokens each."""
    plan, grpo = functools.partial(make_plan, arguments), functools.partial(make_plan, arguments, algorithm="grpo")
    if arguments.compare == "settings":
        sizes = [size for size in (4, 8, 16, 32, 64, 128) if size != tuned_settings("tokens:", "grpo")["group_size"]]
        return [
            grpo("GRPO"),
            plan("PPO, value head", "ppo", shared_critic=True),
            plan("PPO, critic apart", "ppo"),
            *(plan(label, name) for label, name in (("RLOO", "rloo"), ("Dr. GRPO", "dr_grpo"), ("GSPO", "gspo"))),
            plan("DAPO", "dapo", {"filter_overlong": True}),
            *(grpo(f"groups of {size}", group_size=size) for size in sizes),
            *(grpo(f"clip {width}", clip_low=width, clip_high=width) for width in (0.05, 0.1, 0.4)),
            *(grpo(f"KL coefficient {coef:g}", kl_coef=coef) for coef in (0.0, 0.1, 1.0)),
        ]
    if arguments.compare == "rewards":
        task = make_task(arguments.task)
        added = task._replace(rewards=(ACCURACY, FORMAT))
        gate = task._replace(rewards=(ACCURACY._replace(function=gated(accuracy, well_formed)),))
        centred = objectives.outcome(objectives.group_centered)
        apart = (objectives.decoupled_normalized, objectives.reward_part_scores, objectives.reward_part_weights)
        return [
            grpo("accuracy alone", task=task),
            grpo("format added", task=added),
            grpo("format as a gate", task=gate),
            grpo("format added, no std", slots={"advantage": centred}, task=added),
            grpo("format added, decoupled", slots={"advantage": objectives.outcome(*apart)}, task=added),
        ]
    if arguments.compare == "values":  # without groups, each completion has its own prompt
        return [
            grpo("GRPO"),
            plan("RLOO", "rloo"),
            plan("mean of all", "reinforce_plus_plus", group_size=1),
            plan("PPO", "ppo"),
        ]
    if arguments.compare == "variety":
        bonuses = {"entropy bonus 0.01": {"entropy_coef": 0.01}, "KL coefficient 0.1": {"kl_coef": 0.1}}
        bonuses["clip-higher 0.5"] = {"clip_high": 0.5}
        runs = [grpo(label, **changes) for label, changes in bonuses.items()]
        return [grpo("GRPO"), *runs, plan("pass@k", "pass_at_k")]
    return [plan(arguments.algorithm, arguments.algorithm)]


class AccuracyCurves:
    """Measures accuracies on held-out prompts along each run, the same prompts for all, and writes accuracy.json.

    A point has the `steps` of each seed, and its `greedy`, `sampled`, `pass_at_8` and `well_formed` answers. A file in
    `out` is continued.
    """

    def __init__(self, out: Path, key: jax.Array):
        self._path, self._key, self._programs = out / "accuracy.json", key, {}
        self.curves: dict[str, list[dict]] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def __call__(self, plan: RunSpec, progress: Progress, chunk: Chunk | None) -> None:
        """Adds a point to the run's curve if it is time for one; the callback of `CommandStudy.run_all`."""
        steps = np.asarray(progress.steps)
        # A resumed run repeats the points after its checkpoint.
        points = [point for point in self.curves.get(plan.label, []) if (point["steps"] < steps).any()]
        self.curves[plan.label] = points
        distance = int(plan.hyperparams.total_steps) / NUM_POINTS
        if points and not progress.ended.all() and (steps - points[-1]["steps"]).max() < distance:
            return
        if plan.label not in self._programs:
            self._programs[plan.label] = jax.jit(jax.vmap(functools.partial(answers, plan.config), in_axes=(0, None)))
        found = self._programs[plan.label](progress.states.params, self._key)
        greedy, sampled, formed = map(np.asarray, found)
        means = {"greedy": greedy.mean((1, 2)), "sampled": sampled.mean((1, 2)), "well_formed": formed.mean((1, 2))}
        means |= {"steps": steps, "pass_at_8": pass_at_k(sampled, 8)}
        points.append({name: values.tolist() for name, values in means.items()})
        write_json(self._path, self.curves)

    def draw(self, names: tuple[str, ...], title: str, path: Path) -> None:
        """A panel for each run, a curve for each name: the median of the seeds, and each seed."""
        with panels(path, len(self.curves), size=(3.4, 3.2), title=title, sharey=True) as (_, axes):
            for axis, (label, points) in zip(axes, self.curves.items(), strict=True):
                steps = np.array([point["steps"] for point in points])
                for color, name in enumerate(names):
                    values = np.array([point[name] for point in points])
                    axis.plot(steps, values, color=f"C{color}", alpha=0.25, linewidth=0.8)
                    axis.plot(steps.mean(1), np.median(values, axis=1), color=f"C{color}", label=name.replace("_", " "))
                axis.set(title=label, ylim=(-0.02, 1.02), xlabel="tokens sampled (each seed)")
            axes[0].set_ylabel("share of answers to held-out prompts")
            axes[0].legend(frameon=False, fontsize="small")


def answers(config: Config, params: PyTree, key: jax.Array) -> tuple[jax.Array, ...]:
    """Which greedy and sampled answers are right, and which of the sampled ones are well-formed."""
    greedy = answer(config, params, key, num_prompts=256, greedy=True, env_params=HELD_OUT)
    sampled = answer(config, params, key, num_prompts=NUM_PROMPTS, num_samples=NUM_SAMPLES, env_params=HELD_OUT)
    return greedy.correct, sampled.correct, sampled.well_formed


def exact_match(config: Config, state: TrainState, key: jax.Array) -> jax.Array:
    return answer(config, state.params, key, num_prompts=NUM_FINAL, greedy=True, env_params=HELD_OUT).correct.mean()


def main(arguments: Arguments) -> None:
    check_one_process("warm starts are made and accuracies measured")
    plans, task = make_plans(arguments), arguments.chosen
    score = Score(exact_match, f"exact match of greedy answers to {NUM_FINAL} held-out prompts")
    study = CommandStudy("tokens", plans, arguments, score=score)
    key_start, _, key_accuracies = jax.random.split(jax.random.fold_in(jax.random.key(arguments.seed), 1), 3)
    keys = jax.random.split(key_start, arguments.num_seeds)
    config = Config(environment=plans[0].config.environment)
    start = warm_start(config, keys, target=task.target, learning_rate=task.learning_rate)
    if (start.accuracy < task.target).any():
        raise ConfigError(f"the warm start did not reach a sampled accuracy of {task.target} in all seeds; lower it")
    study.console.print(f"warm start, {start.updates.max()} updates: sampled accuracy {start.accuracy}", soft_wrap=True)
    curves = AccuracyCurves(study.out, key_accuracies)

    def options(plan):
        params = functools.partial(params_from_warm_start, plan.config, start.params["actor"], keys)
        return {"params": params, "callback": functools.partial(curves, plan)}

    study.run_all(options)
    names = {"rewards": ("sampled", "well_formed"), "variety": ("sampled", "pass_at_8")}
    title = f"{plans[0].config.env.name}: median of {arguments.num_seeds} seeds, each faint"
    curves.draw(names.get(arguments.compare, ("greedy", "sampled")), title, study.out / "accuracy.png")
    study.finish()
    study.console.print(f"Accuracies during training: accuracy.json and accuracy.png in {study.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
