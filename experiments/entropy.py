"""An entropy that is held, beside fixed weights of the bonus: `python -m experiments.entropy`."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import PPO, evaluate, run, tuned
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Seed, Seeds, Steps
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.hyperparams import completed
from grpo_jax.objectives import EntropyHyperparams, adaptive_entropy_coefficient, with_hyperparams
from grpo_jax.recording.figures import draw_curves
from grpo_jax.recording.statistics import describe_estimate, estimate, learning_curve
from grpo_jax.sweeps.runs import run_keys

from .harness.summaries import TABLE, write_markdown

HELD = PPO._replace(
    entropy_controller=with_hyperparams(adaptive_entropy_coefficient, target="entropy_target"),
    hyperparams=EntropyHyperparams,
)
FIXED, HELD_AT = "entropy_coef", "entropy_target"
VALUES = {FIXED: (0.0, 0.01, 0.1), HELD_AT: (0.3, 0.4, 0.5)}


@dataclasses.dataclass
class Arguments:
    """Trains PPO on CartPole with fixed weights of the entropy bonus, and with a controller that follows a target."""

    num_seeds: Seeds = 8
    """Independent runs of each."""
    total_steps: Steps = 300_000
    """Environment steps a seed may take."""
    seed: Seed = 0
    """Of all randomness."""
    out: Path = Path("runs/entropy")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    rows, curves = [], {}
    for name, algorithm in ((FIXED, PPO), (HELD_AT, HELD)):
        for value, (result, scores) in zip(VALUES[name], train(name, algorithm, arguments), strict=True):
            label, entropy = f"{name}={value:g}", result["policy/entropy"]
            last = entropy[-(len(entropy) // 10) :].mean(axis=0)
            curves[label] = learning_curve(result["steps"], entropy, None)
            seeds = f"{last.min():.2f} to {last.max():.2f}"
            rows.append([f"`{label}`", f"{last.mean():.2f}", seeds, describe_estimate(estimate(scores))])
    arguments.out.mkdir(parents=True, exist_ok=True)
    panel, what = {"PPO on CartPole-v1": curves}, "entropy of the policy, nats"
    draw_curves(panel, arguments.out / "entropy.png", "environment steps", arguments.num_seeds, what=what)
    write_markdown(arguments.out / TABLE, ["setting", "entropy", "of the seeds", "final return"], rows)
    make_console().print((arguments.out / TABLE).read_text(), f"Results in {arguments.out}", soft_wrap=True)


def train(name: str, algorithm, arguments: Arguments) -> list[tuple[dict, np.ndarray]]:
    """Metrics `[num_iterations, num_seeds]` and final returns `[num_seeds]`, for each value of a hyperparameter."""
    values, num_seeds = VALUES[name], arguments.num_seeds
    keys, keys_score = (jnp.tile(each, len(values)) for each in run_keys(arguments.seed, num_seeds))
    config, hyperparams = tuned("CartPole-v1", "ppo", **{FIXED: 0.0, "total_steps": arguments.total_steps})
    config = dataclasses.replace(config, algorithm=algorithm)
    hyperparams = completed(hyperparams, config.hyperparams_class)
    result = run(config, hyperparams.replace(**{name: np.repeat(values, num_seeds)}), keys)
    played = jax.vmap(lambda state, key: evaluate(config, state, key, num_episodes=128).returns.mean())
    scores = np.asarray(jax.jit(played)(result.states, keys_score)).reshape(len(values), num_seeds)
    metrics = {"policy/entropy": result.metrics["policy/entropy"], "steps": result.steps}
    blocks = {key: np.split(value, len(values), axis=1) for key, value in metrics.items()}
    return [({key: block[i] for key, block in blocks.items()}, scores[i]) for i in range(len(values))]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
