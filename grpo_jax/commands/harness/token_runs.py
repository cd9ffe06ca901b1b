"""What experiments on token tasks share: warm starts, accuracies on held-out prompts along a run, samples."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization
from rich.console import Console

from grpo_jax import Algorithm, Config, TrainState, with_reference
from grpo_jax.config import kept_with
from grpo_jax.environments.tokens import ASK, text
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.answers import answer
from grpo_jax.groups import FRESH
from grpo_jax.objectives import kl_to_behaviour
from grpo_jax.policies import add_lora
from grpo_jax.recording import RunSpec, pass_at_k
from grpo_jax.recording.figures import panels
from grpo_jax.recording.files import replacement, write_json
from grpo_jax.sweeps.runs import Score
from grpo_jax.training.imitation import WarmStart, warm_start
from grpo_jax.training.progress import Chunk, Progress
from grpo_jax.types import PyTree

Point = Mapping[str, list[float]]
HELD_OUT = {"held_out": 1}
NUM_FINAL, NUM_PROMPTS, NUM_SAMPLES = 512, 64, 16


def _exact_match(config: Config, state: TrainState, key: jax.Array) -> jax.Array:
    answers = answer(config, state.params, key, num_prompts=NUM_FINAL, greedy=True, env_params=HELD_OUT)
    return answers.correct.mean()


EXACT_MATCH = Score(_exact_match, f"exact match of greedy answers to {NUM_FINAL} held-out prompts")


# --- warm starts -----------------------------------------------------------------------------------------------------


def load_or_make_warm_start(
    config: Config, keys: jax.Array, *, target: float, learning_rate: float, paths: Sequence[Path], console: Console
) -> WarmStart:
    """The warm start in the files, as far as they exist; the others get it, or all a new one.

    Raises ConfigError if a file has a warm start of other settings, two files differ, or the target was not reached.
    """
    description = {
        "task": config.env.task.name,
        "target": target,
        "learning_rate": learning_rate,
        "keys": np.asarray(jax.random.key_data(keys)).tolist(),
        **{name: str(value) for name, value in dataclasses.asdict(config.network).items()},
    }

    def report(accuracy, updates):
        console.print(
            f"warm start, {updates.max()} updates: sampled accuracy {format_shares(accuracy)}", soft_wrap=True
        )

    start = None
    for path in paths:
        if path.exists():
            found = _read_warm_start(path, description)
            if start is not None and not jax.tree.all(jax.tree.map(np.array_equal, start.params, found.params)):
                raise ConfigError(f"the warm start in {path} has other params than {paths[0]}; name another file")
            start = found
            console.print(f"Warm start from {path}: sampled accuracy {format_shares(start.accuracy)}", soft_wrap=True)
    if start is None:
        start = warm_start(config, keys, target=target, learning_rate=learning_rate, report=report)
        if (start.accuracy < target).any():
            raise ConfigError(f"the warm start did not reach a sampled accuracy of {target} in all seeds; lower it")
    for path in paths:
        if not path.exists():
            with replacement(path) as temporary:
                temporary.write_bytes(serialization.msgpack_serialize({**start._asdict(), "description": description}))
    return start


def _read_warm_start(path: Path, description: Mapping[str, Any]) -> WarmStart:
    """The warm start in a file; raises ConfigError unless it has one, with the same description."""
    content = path.read_bytes()
    try:
        saved = serialization.msgpack_restore(content)
        other = saved.pop("description")
        start = WarmStart(**saved)
    except Exception as error:  # of msgpack, or of another content
        raise ConfigError(f"{path} is not a warm start ({error!r:.100}); name another file (--warm-start)") from error
    for name, value in description.items():
        if other.get(name) != value:
            raise ConfigError(
                f"{name} is {value!r} here, and {other.get(name)!r} in the warm start {path}; use what that was made "
                "with, or name another file (--warm-start), for a new run another folder (--out)"
            )
    return start


def prompted(algorithm: Algorithm) -> Algorithm:
    """The algorithm with rollouts that begin with a prompt; a KL penalty is to the policy before training.

    Algorithms that have no KL penalty by design, such as DAPO, get none; those with values of states do.
    """
    algorithm = algorithm._replace(start=FRESH)
    has_values = algorithm.critic is not None or algorithm.baseline is not None or algorithm.num_branches
    has_kl = kl_to_behaviour in algorithm.penalties or has_values
    return with_reference(algorithm) if has_kl else algorithm


def params_from_warm_start(config: Config, actor: PyTree, keys: jax.Array) -> PyTree:
    """Parameters of a policy whose networks, also the critic, are copies of a warm start's actor, with new heads.

    With LoRA the actor gets fresh adapters.
    """

    def init(key, actor):
        if config.network.adapter is not None:
            actor = add_lora(config.network, {"actor": actor}, key)["actor"]
        return {
            name: {part: actor.get(part, value) for part, value in network.items()}
            for name, network in config.policy.init(key).items()
        }

    return kept_with(config, ("params from a warm start",), lambda: jax.jit(jax.vmap(init)))(keys, actor)


# --- accuracies along a run ------------------------------------------------------------------------------------------


class AccuracyCurves:
    """Measures accuracies on held-out prompts before, during and after each run, and writes them to accuracy.json.

    A point has the `steps` of each seed, and its `greedy`, `sampled`, `pass_at_8` and `well_formed` answers to prompts
    of `key`, which are the same for all runs. Of each run there are about `num_points`; a file in `out` is continued.
    """

    def __init__(self, out: Path, key: jax.Array, num_points: int = 20):
        self._path, self._key, self._num_points = out / "accuracy.json", key, num_points
        self.curves: dict[str, list[Point]] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._programs = {}

    def __call__(self, plan: RunSpec, progress: Progress, chunk: Chunk | None) -> None:
        """Adds a point to the run's curve if it is time for one; the callback of `Study.run_all`."""
        distance = int(plan.hyperparams.total_steps) / self._num_points
        steps = np.asarray(progress.steps)
        # A resumed run repeats the points after its checkpoint.
        points = [point for point in self.curves.get(plan.label, []) if (point["steps"] < steps).any()]
        self.curves[plan.label] = points
        if points and not progress.ended.all() and (steps - points[-1]["steps"]).max() < distance:
            return
        if plan.label not in self._programs:
            self._programs[plan.label] = jax.jit(jax.vmap(functools.partial(_answers, plan.config), in_axes=(0, None)))
        answers = self._programs[plan.label](progress.states.params, self._key)
        greedy, sampled, formed = map(np.asarray, answers)
        means = {"greedy": greedy.mean((1, 2)), "sampled": sampled.mean((1, 2)), "well_formed": formed.mean((1, 2))}
        means |= {"steps": steps, "pass_at_8": np.asarray(pass_at_k(sampled, 8))}
        points.append({name: values.tolist() for name, values in means.items()})
        write_json(self._path, self.curves)


def _answers(config: Config, params: PyTree, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    greedy = answer(config, params, key, num_prompts=256, greedy=True, env_params=HELD_OUT)
    sampled = answer(config, params, key, num_prompts=NUM_PROMPTS, num_samples=NUM_SAMPLES, env_params=HELD_OUT)
    return greedy.correct, sampled.correct, sampled.well_formed


def show_samples(config: Config, params: PyTree, key: jax.Array, console: Console, *, when: str) -> None:
    """Prints a policy's answers to some held-out prompts, and whether they are right."""
    task = config.env.task
    ask = functools.partial(answer, config, num_prompts=6, num_samples=2, env_params=HELD_OUT)
    prompts, completions, correct, _ = jax.tree.map(np.asarray, jax.jit(ask)(params, key))
    console.print(f"Sampled answers to held-out prompts {when}, of the first seed:", soft_wrap=True)
    for prompt, samples, verdicts in zip(prompts, completions, correct, strict=True):
        pairs = zip(samples, verdicts, strict=True)
        line = ",  ".join(f"{text(task, sample)} {'right' if is_right else 'wrong'}" for sample, is_right in pairs)
        console.print(f"  {text(task, prompt)}{task.vocabulary[ASK]} {line}", soft_wrap=True)


def plot_accuracies(curves: dict[str, list[Point]], names: tuple[str, ...], title: str, out: Path) -> None:
    """Draws accuracy.png: a panel for each run, a curve for each name: the median of the seeds, and each seed."""
    from matplotlib.ticker import EngFormatter

    with panels(out / "accuracy.png", len(curves), size=(3.4, 3.2), title=title, sharey=True) as (_, axes):
        for axis, (label, points) in zip(axes, curves.items(), strict=True):
            steps = np.array([point["steps"] for point in points])
            for color, name in enumerate(names):
                values = np.array([point[name] for point in points])
                axis.plot(steps, values, color=f"C{color}", alpha=0.25, linewidth=0.8)
                axis.plot(steps.mean(1), np.median(values, axis=1), color=f"C{color}", label=name.replace("_", " "))
            axis.set(title=label, ylim=(-0.02, 1.02), xlabel="tokens sampled (each seed)")
            axis.title.set_fontsize("small")
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[0].set_ylabel("share of answers to held-out prompts")
        axes[0].legend(frameon=False, fontsize="small")


def format_shares(values: np.ndarray) -> str:
    return " ".join(f"{value:.2f}" for value in values)
