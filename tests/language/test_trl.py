"""The same run in TRL: the flags of a row of docs/coming_from.md give TRL's loss and gradient for its settings."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from probes import Probe, acted, known_policy

from grpo_jax import Config
from grpo_jax.commands.harness.language_flags import parse
from grpo_jax.commands.lm import make_algorithm
from grpo_jax.policies.distributions import categorical
from grpo_jax.policies.sampling import with_temperature
from grpo_jax.types import Trajectory
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.loss import loss

REPOSITORY = Path(__file__).parents[2]
SECTION = (REPOSITORY / "docs/coming_from.md").read_text(encoding="utf-8").partition("### The same run in TRL")[2]
FLAGS = dict(re.findall(r"^\| `([^`]+)` \| `(--[^`]+)` \|", SECTION.partition("\n#")[0], re.M))
"""The flags of each row of the table, by its settings."""
TRL = json.loads((REPOSITORY / "tests/golden/trl_losses.json").read_text())

# The inputs of golden/README.md, time-major.
RANDOM = np.random.RandomState(0)
TOKENS, LENGTHS = RANDOM.randint(7, size=(32, 6)).T, RANDOM.randint(1, 7, size=32)
REWARDS = np.float32([0, 1, 0, 0, *([0.5] * 4), 0, 0.001, 0.002, 0.004, *RANDOM.randint(5, size=20)])
POLICY, BEHAVIOUR, REFERENCE, DIRECTION = np.swapaxes(RANDOM.normal(size=(4, 32, 6, 7)).astype(np.float32), 1, 2)
PROBE, STEPS = Probe(), np.arange(6)[:, None]
VALID, LAST = LENGTHS > STEPS, LENGTHS - 1 == STEPS


@functools.cache
def parsed(flags):
    return parse(f"--model m --prompts p --reward a:b {FLAGS['GRPOConfig()']} {flags}".split())


def compared(flags):
    """Loss, norm of the gradient by the logits, and its product with a direction."""
    hyperparams, algorithm = parsed(flags).hyperparams, make_algorithm(parsed(flags))
    policy = known_policy._replace(sequence=lambda logits, *_: (logits, None), distribution=categorical(7))
    policy = with_temperature(policy._replace(has_critic=False), hyperparams.temperature)
    sizes = {"num_envs": 32, "group_size": 4, "num_minibatches": 1, "num_microbatches": 1}
    config = Config(environment=PROBE, algorithm=algorithm._replace(whole_sequences=True), **sizes)
    behaviour, tokens = (POLICY + 0.7 * BEHAVIOUR) / hyperparams.temperature, TOKENS
    rollout = Trajectory(
        **{"reward": REWARDS * LAST, "valid": VALID, "terminated": LAST, "truncated": LAST & False},
        **{"action": tokens, "distribution": behaviour, "value": None, "next_value": None, "carry": ()},
        log_prob=policy.distribution.log_prob(behaviour, tokens),
        **dict.fromkeys(("observation", "episode_return", "discounted_return"), np.zeros(VALID.shape, np.float32)),
        episode_length=jnp.ones(VALID.shape),
    )
    state = acted(None, reference_params=POLICY + 0.7 * REFERENCE)
    batch = make_batch(config, policy, state, rollout, hyperparams)
    of_params = jax.value_and_grad(loss, argnums=2, has_aux=True)
    (total, _), gradient = of_params(config, policy, POLICY, batch, batch.weight, hyperparams)
    return total, jnp.linalg.norm(gradient), jnp.sum(gradient * DIRECTION)


def test_flags_give_the_losses_of_trl():
    dapo = "--algorithm dapo --clip-high 0.2"
    different = {FLAGS[row]: None for row in TRL["cases"]} | {dapo: None}
    found = jax.jit(lambda: {flags: compared(flags) for flags in different})()
    for row, expected in TRL["cases"].items():
        skipped = 1 if "cispo" in row else 0  # the loss there has log pi in place of the log-ratio: another constant
        actual = np.array(found[FLAGS[row]])
        np.testing.assert_allclose(actual[skipped:], expected[skipped:], rtol=1e-5, atol=1e-7, err_msg=row)
    of_live_groups = VALID.sum() / (VALID.sum() - VALID[:, 4:8].sum())  # one group has equal rewards
    expected = np.array(TRL["cases"]["GRPOConfig()"]) * of_live_groups
    np.testing.assert_allclose(found[dapo], expected, rtol=1e-5, err_msg="what the table says of dapo")


def test_the_first_row_has_the_defaults_of_trl_and_all_rows_have_flags():
    arguments, defaults = [parsed(flags) for flags in FLAGS.values()][0], TRL["defaults"]
    numbers = {"adam_eps": "adam_epsilon", "kl_coef": "beta", "clip_low": "epsilon", "clip_high": "epsilon"}
    for name in ("learning_rate", "max_grad_norm", "temperature", *numbers):
        assert getattr(arguments.hyperparams, name) == defaults[numbers.get(name, name)], name
    settings = {"max_completion": "max_completion_length", "group_size": "num_generations"}
    settings |= {"num_epochs": "num_iterations", "schedule": "lr_scheduler_type", "checkpoint_layers": "bf16"}
    for name, theirs in settings.items():
        assert getattr(arguments, name) == defaults[theirs], name
