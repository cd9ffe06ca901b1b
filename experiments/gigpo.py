"""GiGPO beside GRPO where states repeat: `python -m experiments.gigpo`.

FourRooms has equal states, CartPole similar ones (in the same bins), and in the calculator, a text of several turns,
members ask the same and read the same result. GRPO with returns-to-go compares members at the same step, whatever their
states. All have the same settings, which were chosen for GRPO.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from grpo_jax import GRPO, Config, Hyperparams, evaluate, make_init, run, warm_start, with_reference
from grpo_jax.algorithms import GIGPO, GRPO_RETURN_TO_GO
from grpo_jax.baselines import gigpo_advantage
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Seed, Seeds, Share
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.policies import Transformer
from grpo_jax.recording.figures import draw_curve, panels
from grpo_jax.recording.statistics import Curve, describe_estimate, estimate, learning_curve
from grpo_jax.sweeps.runs import run_keys, score_summary

from .harness.summaries import TABLE, chosen, read_results, write_results

GROUPS = {"num_envs": 128, "group_size": 16, "num_minibatches": 16}
ROOMS = {"env_params": {"max_steps_in_episode": 200}, "normalize_observations": True}
BINS = gigpo_advantage(bin_width=(0.5, 0.5, 0.05, 0.5))  # m, m/s, rad, rad/s
TASKS = {
    "FourRooms-misc": (GROUPS | ROOMS, {"total_steps": 300_000, "entropy_coef": 0.01}, GIGPO),
    "CartPole-v1": (GROUPS, {"total_steps": 200_000}, GIGPO._replace(advantage=BINS)),
    "tokens:calculator-1": (
        GROUPS | {"num_minibatches": 4, "network": Transformer(width=32)},
        {"total_steps": 80_000, "learning_rate": 3e-4, "kl_coef": 0.01, "discount": 1.0},
        GIGPO,
    ),
}
"""By the environment: fields of the config, hyperparameters, and GiGPO with its kind of equal states."""
ALGORITHMS = ("GRPO", "GRPO, return-to-go", "GiGPO")
WARM_START = 0.3
"""Sampled accuracy at which warm starts on solutions end."""


@dataclasses.dataclass
class Arguments:
    """Trains GRPO and GiGPO on tasks whose states repeat."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Environments; those of which the folder has results are not trained again."""
    num_seeds: Seeds = 8
    """Independent runs of each."""
    budget: Share = 1.0
    """Share of each task's environment steps."""
    seed: Seed = 0
    """Of all randomness."""
    out: Path = Path("runs/gigpo")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    console = make_console()
    results = read_results(arguments.out, arguments)
    for name in chosen(TASKS, arguments.tasks, "task"):
        if name not in results:
            console.print(f"training on {name}")
            results[name] = train(name, arguments)
            write_results(results, arguments.out, ["environment", "steps", "before", *ALGORITHMS], table_row, arguments)
    draw(results, arguments.out / "gigpo.png")
    console.print((arguments.out / TABLE).read_text(), f"Results in {arguments.out}", soft_wrap=True)


def table_row(name: str, entry: dict) -> list[str]:
    scores = (entry["before"], *(entry[algorithm] for algorithm in ALGORITHMS))
    intervals = [describe_estimate(estimate(np.array(each["per_seed"])), ".3g") for each in scores]
    return [name, f"{entry['steps']:,}", *intervals]


def train(name: str, arguments: Arguments) -> dict:
    """Curves and final scores of the algorithms: mean returns of 128 sampled episodes, of held-out prompts if any."""
    fields, numbers, gigpo = TASKS[name]
    numbers = numbers | {"total_steps": int(numbers["total_steps"] * arguments.budget), "final_learning_rate": 0.0}
    keys, keys_score = run_keys(arguments.seed, arguments.num_seeds)
    is_text = name.startswith("tokens:")
    held_out = {"env_params": {"held_out": 1}} if is_text else {}
    entry, params = {"steps": numbers["total_steps"]}, None

    for label, algorithm in zip(ALGORITHMS, (GRPO, GRPO_RETURN_TO_GO, gigpo), strict=True):
        config = Config(name, algorithm=with_reference(algorithm) if is_text else algorithm, **fields)
        if is_text and params is None:
            params = warm_start(config, keys, target=WARM_START).params

        def scores(states, config=config):
            played = jax.vmap(lambda s, k: evaluate(config, s, k, num_episodes=128, **held_out).returns.mean())
            return score_summary(np.asarray(jax.jit(played)(states, keys_score)))

        if "before" not in entry:
            start = jax.jit(jax.vmap(make_init(config), (0, None)))(keys, Hyperparams())
            entry["before"] = scores(start if params is None else start.replace(params=params))
        result = run(config, Hyperparams(**numbers), keys, params=params)
        counts = np.nan_to_num(result.metrics["episode/count"])
        curve = learning_curve(result.steps, result.metrics["episode/return_mean"], counts)
        curve = {field: np.asarray(values).tolist() for field, values in curve._asdict().items()}
        entry[label] = scores(result.states) | {"curve": curve}
    return entry


def draw(results: dict[str, dict], path: Path) -> None:
    """A panel for each task, with the training curves of the algorithms."""
    with panels(path, len(results), size=(3.4, 2.6), columns=3) as (figure, axes):
        for (name, entry), axis in zip(results.items(), axes, strict=True):
            for index, label in enumerate(ALGORITHMS):
                curve = Curve(**{field: np.array(values) for field, values in entry[label]["curve"].items()})
                draw_curve(axis, curve, f"C{index}", label=label)
            axis.set_title(name, fontsize="small")
        axes[0].legend(fontsize="small")
        figure.supxlabel("environment steps (each seed)", fontsize="small")
        figure.supylabel("return of training episodes", fontsize="small")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
