"""Target policy optimisation (TPO) on its own task, beside more opponents: `python -m experiments.token_reversal`.

Random bits are to be written backwards, and only a completion without a mistake is rewarded. All methods sample equally
much and have equal trials of the learning rate and of the number of epochs, on other seeds. The paper's sizes:
`--trial-length 7 --lengths 7 8 9 10 --num-prompts 100 --num-iterations 2000 --network transformer`.
"""

import dataclasses
import functools
from datetime import datetime
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import GRPO, Algorithm, Config, make_train
from grpo_jax.algorithms import CISPO, DR_GRPO, GPG, GSPO, MAX_RL, RLOO, TPO
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Count, OutFolder, Seed, Seeds
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.environments import Environment
from grpo_jax.environments.environment import transition
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.tokens import Completion
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import TpoHyperparams, k3, mean_of_sequence_means, outcome, with_hyperparams
from grpo_jax.policies import MLP, Transformer
from grpo_jax.recording.files import write_json
from grpo_jax.recording.statistics import percentiles

from .harness.provenance import provenance
from .harness.summaries import SUMMARY, TABLE, read_results, write_markdown

GROUP_SIZE = 8
RATES, EPOCHS = (3e-3, 1e-2, 3e-2, 1e-1), (1, 4)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Trains TPO and its opponents to write random bits backwards, rewarded only for whole completions."""

    lengths: tuple[Count, ...] = (7, 8)
    """Bits of a prompt and of its completion."""
    trial_length: Count = 6
    """That at which learning rates and numbers of epochs are tried."""
    num_prompts: Count = 16
    """Prompts of an iteration, with 8 completions each."""
    num_iterations: Count = 300
    """Iterations of each seed; the paper calls them episodes."""
    network: Literal["mlp", "transformer"] = "mlp"
    """A transformer of 2 layers and 4 heads, as in the paper, or two dense layers that see the prompt, the bits so far
    and the place."""
    width: Count = 64
    """Width of the network."""
    num_seeds: Seeds = 20
    """Seeds of each result, a multiple of 4: as many runs try 4 learning rates."""
    seed: Seed = 0
    """Of all randomness."""
    out: OutFolder = Path("runs/token_reversal")
    """Folder for the results. Given again, the command goes on from what is there."""


def token_reversal(length: int, as_tokens: bool) -> Environment:
    """An action is the next bit; the reward of the last one is 1 if all are the prompt's backwards."""

    def observe(state):
        if as_tokens:
            return jnp.where(state.length > 0, state.tokens[state.length - 1], state.problem[-1])
        written = jnp.where(state.tokens >= 0, 2.0 * state.tokens - 1.0, 0.0)
        return jnp.concatenate([2.0 * state.problem - 1.0, written, jax.nn.one_hot(state.length, length)])

    def reset(key, params):
        state = Completion.empty(jax.random.randint(key, (length,), 0, 2), length)
        return state, observe(state)

    def step(key, state, action, params):
        after = state.append(action)
        ended = after.length >= length
        right = ended & jnp.all(after.tokens == state.problem[::-1])
        return transition(after, observe(after), right, ended, False)

    seen = jax.ShapeDtypeStruct((), jnp.int32) if as_tokens else jax.ShapeDtypeStruct((3 * length,), jnp.float32)
    made = Environment(f"reversal-{length}", reset, step, {}, seen, Discrete(2), None, max_steps=length)
    return made._replace(prompt=(lambda state, params: state.problem[:-1]) if as_tokens else None)


def whole_log_ratio(log_ratio, batch, hyperparams):
    """The sum over a sequence, at each of its steps: the ratio of the paper's GRPO is that of the whole completion."""
    return jnp.broadcast_to(jnp.sum(log_ratio, axis=0, where=batch.mask, keepdims=True), log_ratio.shape)


def whole_kl(prediction, batch, hyperparams):
    log_ratio = whole_log_ratio(prediction.log_prob - batch.log_prob, batch, hyperparams)
    return hyperparams.kl_coef * k3(log_ratio, jnp.zeros_like(log_ratio))


def delightful_ratio(log_ratio, batch, hyperparams):
    """DG (https://arxiv.org/abs/2603.14608): with the plain policy gradient A sg(sigmoid(-A log pi)) log pi."""
    gate = jax.nn.sigmoid(-batch.advantage * (batch.log_prob + log_ratio))
    return jax.lax.stop_gradient(gate) * log_ratio


WHOLE = GRPO._replace(ratio=whole_log_ratio, penalties=(whole_kl,), reduce=mean_of_sequence_means)
BY_BATCH = outcome(lambda scores: scores - jnp.mean(scores))  # the paper's PPO and DG have no groups and no critic
OPPONENTS = {
    "GRPO of the paper": (WHOLE, {"kl_coef": 0.04}),
    "that without its KL": (WHOLE, {}),
    "GRPO": (GRPO, {"kl_coef": 0.04}),
    "GRPO without KL": (GRPO, {}),
    "Dr. GRPO": (DR_GRPO, {}),
    "DAPO": (GRPO, {"clip_high": 0.28}),  # groups without a difference have no gradient here
    "MaxRL": (MAX_RL, {}),
    "GSPO": (GSPO, {"clip_low": 0.03, "clip_high": 0.04}),
    "CISPO": (CISPO, {"clip_low": 1.0}),
    "RLOO": (RLOO, {}),
    "PPO": (GRPO._replace(advantage=BY_BATCH), {}),
    "DG": (GPG._replace(advantage=BY_BATCH, ratio=delightful_ratio), {}),
}


class StudyHyperparams(TpoHyperparams):
    """With the number of an opponent."""

    method: float = 0.0


def one_of(algorithms: list[Algorithm]) -> Algorithm:
    """An algorithm with the slots of the one whose number is `method`, a traced one: one program for all of them."""

    def slot(name, *arguments, method):
        functions = [each.penalties[0] if name == "penalties" else getattr(each, name) for each in algorithms]
        return jax.lax.switch(method.astype(int), [lambda f=f: f(*arguments) for f in functions])

    def traced(name):
        def function(*arguments):
            hyperparams = next(each for each in arguments if isinstance(each, Hyperparams))
            return slot(name, *arguments, method=hyperparams.method)

        return function

    reduce = with_hyperparams(lambda mask, *, method: slot("reduce", mask, method=method), "method")
    slots = {name: traced(name) for name in ("advantage", "ratio", "surrogate")}
    return GRPO._replace(**slots, penalties=(traced("penalties"),), reduce=reduce, whole_sequences=True)


@functools.cache
def program(arguments: Arguments, length: int, num_epochs: int, is_tpo: bool):
    """`(keys, hyperparams) -> errors [num_rows, num_iterations]` of the samples of each iteration."""
    algorithm, width = TPO if is_tpo else one_of([each for each, _ in OPPONENTS.values()]), arguments.width
    config = Config(
        environment=token_reversal(length, arguments.network == "transformer"),
        algorithm=algorithm._replace(hyperparams=StudyHyperparams),
        num_envs=GROUP_SIZE * arguments.num_prompts,
        group_size=GROUP_SIZE,
        num_epochs=num_epochs,
        num_minibatches=1,
        optimizer="muon",
        schedule="constant",
        network=MLP((width, width)) if arguments.network == "mlp" else Transformer(width=width),
    )
    train = make_train(config, arguments.num_iterations)
    return jax.jit(jax.vmap(lambda *row: 1.0 - train(*row)[1]["episode/return_mean"]))


def errors_of(arguments: Arguments, name: str, length: int, num_epochs: int, rates, keys: jax.Array) -> np.ndarray:
    """`[2, num_rows]`: the share of completions with a mistake, in the last twentieth of the iterations and in all."""
    fields = {"kl_coef": 0.0, "max_grad_norm": np.inf} | ({} if name == "TPO" else OPPONENTS[name][1])
    method = 0.0 if name == "TPO" else float([*OPPONENTS].index(name))
    hyperparams = StudyHyperparams(learning_rate=rates, method=method, **fields).broadcast(len(keys))
    errors = np.asarray(program(arguments, length, num_epochs, name == "TPO")(keys, hyperparams), np.float64)
    last = errors[:, -max(1, arguments.num_iterations // 20) :]
    return np.round([last.mean(axis=1), errors.mean(axis=1)], 4)


def main(arguments: Arguments) -> None:
    console, num_seeds, num_trials = make_console(), arguments.num_seeds, arguments.num_seeds // len(RATES)
    if num_seeds % len(RATES):
        raise ConfigError(
            f"num_seeds={num_seeds} is not a multiple of the {len(RATES)} rates; use {len(RATES) * (num_trials + 1)}"
        )
    sizes = {name: value for name, value in vars(arguments).items() if name not in ("lengths", "out")}
    results = {"of": provenance(), "sizes": sizes, "trials": {}, "errors": {}} | read_results(arguments.out)
    if results["sizes"] != sizes:
        raise ConfigError(f"{arguments.out} has results of {results['sizes']}; give another --out")

    def measured(part: str, name: str, length: int, num_epochs: int, *of) -> np.ndarray:
        label = f"{name}, length {length}, epochs {num_epochs}"
        if label not in results[part]:
            results[part][label] = errors_of(arguments, name, length, num_epochs, *of)
            write_json(arguments.out / SUMMARY, results)
            means = np.mean(results[part][label], axis=1)
            console.print(f"{datetime.now():%H:%M} {part}: {label}: {means}", soft_wrap=True)
        return np.array(results[part][label])

    key_trials, key_final = jax.random.split(jax.random.key(arguments.seed))
    trials = np.repeat(RATES, num_trials), jnp.tile(jax.random.split(key_trials, num_trials), len(RATES))
    arguments.out.mkdir(parents=True, exist_ok=True)
    tried, rows = {name: [] for name in ("TPO", *OPPONENTS)}, []
    for num_epochs in EPOCHS:
        for name, settings in tried.items():
            errors = measured("trials", name, arguments.trial_length, num_epochs, *trials)
            last, whole = np.reshape(errors, (2, len(RATES), -1)).mean(axis=2)
            settings += zip(np.round(last, 2), whole, RATES, [num_epochs] * len(RATES), strict=True)
    for name, settings in tried.items():
        _, _, rate, num_epochs = min(settings)
        rows.append([name, *(f"{100 * error:.0f}" for error, *_ in settings), f"{rate:g}, {num_epochs}"])
    for length in arguments.lengths:
        for row, settings in zip(rows, tried.values(), strict=True):
            _, _, rate, num_epochs = min(settings)
            errors = measured("errors", row[0], length, num_epochs, rate, jax.random.split(key_final, num_seeds))
            drawn = np.random.default_rng(0).choice(errors[0], (2000, num_seeds)).mean(axis=1)
            last, low, high, whole = (100 * x for x in (errors[0].mean(), *percentiles(drawn), errors[1].mean()))
            row.append(f"{last:.1f} [{low:.1f}, {high:.1f}], {whole:.0f}")
    header = ["method", *(f"{rate:g}, {num_epochs}" for num_epochs in EPOCHS for rate in RATES), "chosen"]
    write_markdown(arguments.out / TABLE, header + [f"length {length}" for length in arguments.lengths], rows)
    console.print((arguments.out / TABLE).read_text(), f"Results in {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))
