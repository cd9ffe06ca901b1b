"""What a newcomer writes at first, and what it is answered with before anything is compiled."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import GRPO, Config, Hyperparams, make_init, run
from grpo_jax.errors import OTHER_WORDS, ConfigError, KnownFields
from grpo_jax.objectives import EntropyHyperparams
from grpo_jax.policies import MLP, Transformer

CONFIG = Config("Catch-bsuite", algorithm="ppo", num_envs=4, num_steps=4, num_minibatches=2)
KEYS = jax.random.split(jax.random.key(0), 4)


def with_slots(**slots):
    algorithm = GRPO._replace(**slots)
    sizes = {"num_envs": 4, "group_size": 2, "num_minibatches": 2, "env_params": {"max_steps_in_episode": 9}}
    return make_init(Config("Catch-bsuite", algorithm=algorithm, **sizes))(KEYS[0], Hyperparams())


ANSWERS = {
    "a float of training": (lambda: Config(learning_rate=1e-3), r"a field of Hyperparams: Hyperparams\(learning_rate="),
    "gamma": (lambda: Hyperparams(gamma=0.9), "gamma is discount here; write discount=0.9"),
    "gamma elsewhere": (lambda: Config(gamma=0.9), r"gamma is discount here, a field of .*\(discount=0.9\)"),
    "a size": (lambda: Hyperparams(num_envs=4), r"a field of Config: Config\(num_envs=4\)"),
    "a typo": (lambda: Config(num_env=5), "did you mean 'num_envs'"),
    "a number for keys": (lambda: run(CONFIG, Hyperparams(), 0), r"for four seeds: jax.random.split\("),
    "arguments swapped": (lambda: run(Hyperparams(), CONFIG, KEYS), "must be a Config"),
    "three rates": (lambda: run(CONFIG, Hyperparams(learning_rate=jnp.ones(3)), KEYS), r"shape \[3\].* 4 keys"),
    "no parameters": (lambda: run(CONFIG, Hyperparams(), KEYS, params={}), "params have the structure"),
    "no callback": (lambda: run(CONFIG, Hyperparams(), KEYS, callback=3), "callback=3 must be a function"),
    "a class": (lambda: Config(environment=KnownFields), r"is a class; write KnownFields\(\)"),
    "advantage": (lambda: with_slots(advantage=lambda scores: scores), r"slot advantage, .*outcome\(f\)"),
    "penalty": (lambda: with_slots(penalties=(lambda p: p,)), r"slot penalties, .*f\(prediction, batch, hyperparams\)"),
    "own number": (lambda: with_slots(surrogate=lambda r, a, h: h.mine * r), r"Mine\(Hyperparams\): mine: float"),
    "other word": (lambda: with_slots(surrogate=lambda r, a, h: h.gamma * r), "gamma is discount here"),
}


@pytest.mark.parametrize("write, answer", ANSWERS.values(), ids=ANSWERS)
def test_a_mistake_is_answered_with_what_to_write(write, answer):
    with pytest.raises(ConfigError, match=answer):
        write()


def test_words_of_other_libraries_lead_to_the_fields_of_their_page():
    known = {field for kind in (Config, EntropyHyperparams, MLP, Transformer) for field in kind.__dataclass_fields__}
    assert {*OTHER_WORDS.values()} <= known
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    for line in page.splitlines():
        theirs, *ours = line.strip("| ").split(" | ")
        for word in re.findall(r"`(\w+)`", theirs) if ours else ():
            if word in OTHER_WORDS and word not in ours[0]:
                assert OTHER_WORDS[word] in ours[0], line


def test_lists_are_arrays_and_what_is_printed_is_what_was_written():
    rates = Hyperparams(learning_rate=[1e-3, 3e-4]).learning_rate
    np.testing.assert_array_equal(rates, [1e-3, 3e-4])
    assert repr(CONFIG).startswith("Config(environment='Catch-bsuite', algorithm='ppo', num_envs=4, ")
    assert "network=CNN()" in repr(CONFIG) or "network=MLP()" in repr(CONFIG)


class Linear(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1).astype(float)
        return nn.Dense(self.num_outputs)(x), nn.Dense(1)(x)[:, 0]


def test_a_module_of_flax_linen_or_its_class_is_a_network():
    for network in (Linear, Linear(3)):
        config = Config("Catch-bsuite", algorithm="ppo", num_envs=4, num_steps=4, num_minibatches=2, network=network)
        params = jax.eval_shape(config.policy.init, jax.random.key(0))["network"]["params"]
        assert params["Dense_0"]["kernel"].shape == (50, 3)
