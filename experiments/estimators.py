"""Bias and noise of estimates of the policy gradient: `python -m experiments.estimators`.

On small decision processes the gradient is known exactly. Each estimator, made of the library's rollouts, advantages
and losses, plays groups under one fixed policy. The table shows how far the mean of its gradients is from the truth
(in standard errors, and relative to its length), and how noisy a gradient is at equal environment steps.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from rich.progress import track
from rich.table import Table

from grpo_jax import GRPO, PPO, Algorithm, Config, make_init, objectives
from grpo_jax.algorithms import DR_GRPO, KERNEL_GAE, RLOO, SAME_STEP_GAE
from grpo_jax.baselines import KernelHyperparams, kernel_baseline
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Count, OutFile, Seed
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.devices.mesh import make_row_mesh, over_rows
from grpo_jax.groups import ANCHORED, CONTINUE, FRESH, forked
from grpo_jax.objectives import mean_of_sequence_sums, mean_over_steps
from grpo_jax.policies import MLP
from grpo_jax.recording.figures import panels
from grpo_jax.recording.files import write_json
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.minibatches import make_gradient, make_minibatch

from .harness.provenance import provenance
from .harness.summaries import chosen
from .harness.tabular import PROCESSES, Exact, Tabular, exact_gradient

NUM_ENVS, GROUP_SIZE = 32, 8
NUM_CHAINS = 256  # independent, while the rollouts within a chain are not
WINDOW = 8  # about as long as an episode, so that many are cut
BUDGET = 1000  # environment steps at which noise is compared


@dataclasses.dataclass
class Arguments:
    """Compares estimators of the policy gradient with the truth, and with each other."""

    num_groups: Count = 100_000
    """Groups that each estimator plays on each process."""
    estimators: tuple[str, ...] = ()
    """Labels of the estimators to measure; all of them, if left out."""
    seed: Seed = 0
    """Of the policies and of the groups."""
    out: OutFile | None = None
    """JSON file for the results."""
    plot: OutFile | None = None
    """PNG file for a picture of the results."""


class Estimator(NamedTuple):
    """An estimator of the gradient of an episode's expected return."""

    label: str
    algorithm: Algorithm
    bias: str = ""  # why it is expected to be biased, if it is


def per_episode(algorithm: Algorithm) -> Algorithm:
    """The algorithm with the mean over one-episode rollouts of sums over steps."""
    return algorithm._replace(start=FRESH, reduce=mean_of_sequence_sums, normalize=None, penalties=())


def per_step(algorithm: Algorithm, start) -> Algorithm:
    """The algorithm with the mean over steps, which times the expected length of an episode is the sum over one."""
    return algorithm._replace(start=start, reduce=mean_over_steps, normalize=None, penalties=())


def exact_values(trajectory, policy, params, hyperparams, group_size, *, known: tuple[float, ...], scale: float):
    """The values of a baseline: the exact ones of all states, times a factor."""
    values = scale * jnp.array(known)
    return trajectory.observation @ values, trajectory.final_observation @ values


def estimators(known: Exact) -> list[Estimator]:
    critic = functools.partial(exact_values, known=tuple(known.values.tolist()))
    with_values = PPO._replace(critic=None)
    return_to_go = SAME_STEP_GAE._replace(advantage=objectives.return_minus_value_advantage)
    kernel_gae = KERNEL_GAE._replace(baseline=functools.partial(kernel_baseline, relative=False))
    kernel = kernel_gae._replace(advantage=objectives.return_minus_value_advantage)
    vine = RLOO._replace(advantage=objectives.return_to_go_advantage)
    cut = "the window cuts returns"
    return [
        Estimator("GRPO, fresh", per_episode(GRPO), "divided by the group's standard deviation"),
        Estimator("Dr. GRPO, fresh", per_episode(DR_GRPO), "shorter by 1/G: its mean contains the member itself"),
        Estimator("RLOO, fresh", per_episode(RLOO)),
        Estimator("same step, fresh", per_episode(return_to_go)),
        Estimator("kernel, fresh", per_episode(kernel)),
        Estimator("kernel + GAE, fresh", per_episode(kernel_gae), "bootstraps from noisy values"),
        Estimator("same step, anchored", per_step(return_to_go, ANCHORED), cut),
        Estimator("kernel + GAE, anchored", per_step(kernel_gae, ANCHORED), "bootstraps from noisy values"),
        Estimator("forked", per_step(vine, forked(4)), "later steps of branches weigh more"),
        Estimator(
            "GAE, exact critic",
            per_step(with_values._replace(baseline=functools.partial(critic, scale=1.0)), CONTINUE),
        ),
        Estimator(
            "GAE, critic of half the value",
            per_step(with_values._replace(baseline=functools.partial(critic, scale=0.5)), CONTINUE),
            "bootstraps from wrong values",
        ),
    ]


class Moments(NamedTuple):
    mean: jax.Array  # [P]
    square: jax.Array  # [P] mean of squares
    steps: jax.Array  # mean environment steps of a rollout


def moments(config: Config, params: Any, key: jax.Array, num_rollouts: int) -> Moments:
    """The moments over consecutive rollouts under fixed parameters, after ten that are left out as burn-in."""
    policy = config.policy
    hyperparams = KernelHyperparams(discount=1.0, gae_lambda=0.95, kernel_bandwidth=0.5)
    key, key_init = jax.random.split(key)
    state = make_init(config)(key_init, hyperparams, params=params)
    simulator = Simulator(config.env, policy, params, hyperparams.discount)

    def rollout(carry, _):
        state, key = carry
        key, *keys = jax.random.split(key, 3)
        played, trajectory = collect(config, simulator, state.rollout, *keys)
        batch = make_batch(config, policy, state, trajectory, hyperparams)
        everything = jnp.arange(batch.mask.shape[1]).reshape(config.shuffle_blocks, -1)
        whole = make_minibatch(config, batch, hyperparams, everything)
        _, gradient = make_gradient(config, policy, batch, hyperparams)(params, whole)
        ascent = -ravel_pytree(gradient)[0]
        state = state.replace(rollout=played)
        return (state, key), (ascent, jnp.sum(trajectory.valid) + config.trunk_steps)

    def add(sums, _):
        carry, sums = sums
        carry, (gradient, steps) = rollout(carry, None)
        return (carry, jax.tree.map(jnp.add, sums, Moments(gradient, gradient**2, steps.astype(jnp.float32)))), None

    carry, _ = jax.lax.scan(rollout, (state, key), length=10)
    nothing = jnp.zeros_like(ravel_pytree(params)[0])
    (_, sums), _ = jax.lax.scan(add, (carry, Moments(nothing, nothing, jnp.zeros(()))), length=num_rollouts)
    return jax.tree.map(lambda leaf: leaf / num_rollouts, sums)


def chains(config: Config, params: Any, keys: jax.Array, num_rollouts: int) -> Moments:
    """The moments of a chain for each key, over all devices."""
    chain = over_rows(lambda key: moments(config, params, key, num_rollouts), make_row_mesh(len(keys)))
    return jax.jit(chain)(keys)


def measure(process: Tabular, estimator: Estimator, params: Any, truth: Any, known: Exact, arguments: Arguments):
    """The row of an estimator in the table."""
    config = Config(
        environment=process,
        algorithm=estimator.algorithm,
        num_envs=NUM_ENVS,
        group_size=1 if estimator.algorithm.start is CONTINUE else GROUP_SIZE,
        num_steps=WINDOW if estimator.algorithm.start.auto_reset else process.default_params.max_steps_in_episode,
        num_minibatches=1,
        num_microbatches=1,
        network=MLP((), actor_init_gain=1.0),
    )
    groups_per_rollout = NUM_ENVS // GROUP_SIZE
    num_rollouts = -(-arguments.num_groups // (NUM_CHAINS * groups_per_rollout))
    keys = jax.random.split(jax.random.key(arguments.seed + 1), NUM_CHAINS)
    estimates = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), chains(config, params, keys, num_rollouts))
    scale = 1.0 if estimator.algorithm.start is FRESH else float(known.episode_length)
    means, truth = scale * estimates.mean, np.asarray(ravel_pytree(truth)[0], np.float64)
    mean, error = means.mean(0), means.std(0, ddof=1) / np.sqrt(NUM_CHAINS)
    steps = float(estimates.steps.mean())
    at_budget = float((scale**2 * estimates.square.mean(0) - mean**2).sum()) * steps / BUDGET
    length, norm = np.linalg.norm(truth), np.linalg.norm(mean)
    return {
        "estimator": estimator.label,
        "expected_bias": estimator.bias,
        "steps_per_rollout": steps,
        "largest_z": float(np.max(np.abs(mean - truth) / np.maximum(error, 1e-12))),
        "relative_bias": float(np.linalg.norm(mean - truth) / length),
        "cosine_of_mean": float(mean @ truth / (norm * length)),
        # Noise as a multiple of the signal, whatever the scale of the gradient.
        "noise_to_signal": float(at_budget / norm**2),
        # One estimate from BUDGET steps, if its noise were the same in all directions.
        "cosine": float(mean @ truth / (length * np.sqrt(norm**2 + at_budget))),
        "num_groups": num_rollouts * NUM_CHAINS * groups_per_rollout,
    }


def main(arguments: Arguments) -> None:
    console = make_console(width=150)
    results = {}
    for make_process in PROCESSES:
        process = make_process()
        policy = Config(environment=process, network=MLP((), actor_init_gain=1.0), num_envs=NUM_ENVS).policy
        params = policy.init(jax.random.key(arguments.seed))
        truth, known = exact_gradient(process, policy, params)
        by_label = {estimator.label: estimator for estimator in estimators(known)}
        compared = chosen(by_label, arguments.estimators, "estimator")
        followed = track(compared.values(), process.name, console=console, transient=True)
        results[process.name] = [measure(process, each, params, truth, known, arguments) for each in followed]
        console.print(table(process.name, results[process.name]))
    if arguments.out is not None:
        write_json(arguments.out, provenance() | {"processes": results})
    if arguments.plot is not None:
        draw(results, arguments.plot)


def table(process: str, rows: list[dict]) -> Table:
    columns = ("estimator", "z", "bias", "cosine of mean", "noise / signal", f"cosine at {BUDGET:,}", "expected bias")
    rendered = Table(*columns, title=process)
    for row in rows:
        numbers = f"{row['largest_z']:.1f}", f"{row['relative_bias']:.1%}", f"{row['cosine_of_mean']:.4f}"
        noise = f"{row['noise_to_signal']:.3g}", f"{row['cosine']:.3f}"
        rendered.add_row(row["estimator"], *numbers, *noise, row["expected_bias"])
    return rendered


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """How well one estimate from `BUDGET` steps points along the true gradient, by process."""
    title = "blue: every parameter's mean is the truth within 3.5 standard errors; orange: biased"
    with panels(path, len(results), size=(4, 5), title=title, sharey=True) as (_, axes):
        for axis, (process, rows) in zip(axes, results.items(), strict=True):
            # Of some twenty parameters, the largest deviation from the truth is more than chance explains.
            colors = ["C1" if row["largest_z"] > 3.5 else "C0" for row in rows]
            axis.barh([row["estimator"] for row in rows], [row["cosine"] for row in rows], color=colors)
            axis.set(title=process, xlabel=f"cosine to the true gradient, {BUDGET:,} steps", xlim=(0, 1))
        axes[0].invert_yaxis()


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
