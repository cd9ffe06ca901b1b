import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from probes import Probe, bits

from grpo_jax import Config, Hyperparams, make_init, make_train_step, run
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP

FIELDS = [field.name for field in dataclasses.fields(Hyperparams)]
OPTIONAL = ["critic_learning_rate", "warmup", "num_iterations", "max_episodes", "beta1", "beta2", "weight_decay"]
LIMITS = [
    *("total_steps", "max_episodes", "clip_low", "clip_high", "value_clip", "kl_limit", "top_k"),
    *("observation_clip", "reward_clip", "max_grad_norm"),
]
CONFIG = Config(
    environment=Probe(),
    algorithm="ppo",
    num_envs=4,
    num_steps=8,
    num_minibatches=1,
    num_epochs=2,
    network=MLP((4,)),
    normalize_observations=True,
    normalize_rewards=True,
)


def test_every_value_is_a_number_that_means_something():
    offenders = [math.nan, math.inf, -math.inf, 1e39, -1e39, 1e-50, None, "0.1", ["0.1"], (0.1,), {}, 1j]
    offenders += [np.array(value) for value in offenders if isinstance(value, float)]
    accepted = []
    for name in FIELDS:
        for value in offenders:
            try:
                Hyperparams(**{name: value}).check()
                accepted.append((name, value))
            except ConfigError as error:
                assert str(error).startswith(f"{name}="), error
    assert [name for name, value in accepted if value is None] == OPTIONAL
    assert sorted(name for name, value in accepted if value is not None) == sorted(2 * LIMITS)
    assert all(value == math.inf for _, value in accepted if value is not None)


@pytest.mark.parametrize("value", [1e-50, ["0.1"], None, "0.1"])
def test_invalid_values_stop_a_run_before_anything_else(value):
    hyperparams = Hyperparams(total_steps=1e3, adam_eps=value)
    with pytest.raises(ConfigError, match="adam_eps="):
        run(CONFIG, hyperparams, jax.random.split(jax.random.key(0), 1))
    with pytest.raises(ConfigError, match="adam_eps="):
        make_init(CONFIG)(jax.random.key(0), hyperparams)


def test_own_hyperparameters_may_be_infinite_but_not_missing():
    @struct.dataclass
    class Mine(Hyperparams):
        bound: float = 1.0
        center: float | None = None

    Mine(bound=math.inf).check()
    for value in (math.nan, None, "text", 1e39):
        with pytest.raises(ConfigError, match="bound="):
            Mine(bound=value).check()


def test_infinite_limits_train_as_very_large_ones():
    limits = [name for name in LIMITS if name not in ("top_k", "max_episodes")]

    def rows(value):
        defaults = np.array([getattr(Hyperparams, name) for name in limits])
        values = np.where(np.eye(len(limits), dtype=bool), value, defaults)
        return Hyperparams(**dict(zip(limits, values.T, strict=True))).broadcast(len(limits))

    @jax.jit
    @jax.vmap
    def trained(hyperparams):
        state, _ = make_train_step(CONFIG)(make_init(CONFIG)(jax.random.key(0), hyperparams))
        return state.params

    unlimited, large = trained(rows(jnp.inf)), trained(rows(1e30))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(unlimited))
    assert bits(unlimited) == bits(large)
