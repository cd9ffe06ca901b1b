"""Custom networks and action distributions: what is used, and what is refused before anything is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from probes import bits, check

from grpo_jax import Config
from grpo_jax.algorithms import KERNEL_GAE
from grpo_jax.baselines import kernel_baseline, policy_features
from grpo_jax.commands.harness.flags import RunFlags, parse
from grpo_jax.errors import ConfigError
from grpo_jax.policies import categorical, make_pure_policy
from grpo_jax.recording.run_folder import describe

SMALL = {"algorithm": "ppo", "num_envs": 4, "num_steps": 4, "num_minibatches": 2, "num_epochs": 1}


def init(key, observation):
    return jax.random.normal(key, (observation.shape[1], 3))


def apply(params, observation):
    x = observation @ params
    return x[:, :2], x[:, 2]


def linear(observation, distribution, critic):
    return make_pure_policy(init, apply, observation, distribution, critic)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A network with a setting."""

    scale: float = 1.0

    def __call__(self, observation, distribution, critic):
        def scaled(params, observation):
            return jax.tree.map(lambda x: self.scale * x, apply(params, observation))

        return make_pure_policy(init, scaled, observation, distribution, critic)


def recurrent(observation, distribution, critic):
    """A sum over the episode, which begins at the initial carry."""

    def apply_step(params, observation, carry):
        carry = {"sum": carry["sum"] + observation}
        return *apply(params, carry["sum"]), carry

    return make_pure_policy(
        *(init, apply_step, observation, distribution, critic),
        initial_carry={"sum": jnp.full(observation.shape, 0.5)},
        features=lambda params, observation, carry: carry["sum"] + observation,
    )


def outputs(config):
    policy = config.policy
    params = policy.init(jax.random.key(0))
    return policy.step(params, jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), policy.initial_carry(params, 3))


def test_a_function_a_path_and_a_frozen_dataclass_are_the_same_network():
    configs = [Config(network=network, **SMALL) for network in (linear, f"{__name__}:linear", Linear())]
    results = [bits(outputs(config)) for config in configs]
    assert results[0] == results[1] == results[2]
    assert configs[0] == Config(network=linear, **SMALL) and hash(configs[0]) == hash(Config(network=linear, **SMALL))
    assert configs[2] == Config(network=Linear(), **SMALL) != Config(network=Linear(2.0), **SMALL)
    by_function, by_path, by_fields = (describe(config)["network"] for config in configs)
    assert by_function["function"] == "linear" and by_path == {"path": f"{__name__}:linear"} | by_function
    assert by_fields["class"]["class"] == "Linear" and by_fields["scale"] == 1.0


def test_a_network_from_the_command_line_has_no_tuned_layers():
    flags = ["--environment", "PointRobot-misc", "--algorithm", "ppo"]
    assert parse(RunFlags, flags).config.network.recurrent == "gru"
    config = parse(RunFlags, [*flags, "--network", f"{__name__}:linear"]).config
    assert not config.policy.has_carry and config.num_epochs == 8, "other tuned settings stay"
    with pytest.raises(ConfigError, match="recurrent='mingru' has no effect on a custom network"):
        parse(RunFlags, [*flags, f"--network={__name__}:linear", "--recurrent", "mingru"])


def test_a_recurrent_sequence_is_its_steps():
    observation = jax.ShapeDtypeStruct((3,), jnp.float32)
    is_first = jnp.array([[1, 0], [0, 0], [0, 1], [1, 0]], bool)
    observations = jax.random.normal(jax.random.key(1), (4, 2, 3))
    policy = recurrent(observation, categorical(2), True)
    params = policy.init(jax.random.key(0))
    carry = before = {"sum": jnp.ones((2, 3))}
    parameters, values = policy.sequence(params, observations, before, is_first)
    features = policy.features(params, observations, before, is_first)
    for t in range(4):
        carry = {"sum": jnp.where(is_first[t][:, None], 0.5, carry["sum"])}
        step_parameters, value, carry = policy.step(params, observations[t], carry)
        np.testing.assert_allclose(parameters[t], step_parameters, atol=1e-6)
        np.testing.assert_allclose(values[t], value, atol=1e-6)
        np.testing.assert_allclose(features[t], carry["sum"], atol=1e-6)
    assert policy.has_carry and Config(network=recurrent, **SMALL).policy.has_carry


def test_free_parameters_and_missing_critics():
    pendulum = Config(environment="Pendulum-v1", network=free, num_envs=4, algorithm="grpo")
    params = pendulum.policy.init(jax.random.key(0))
    assert params["free"].shape == (1,) and set(params) == {"network", "free"}
    parameters, value, _ = pendulum.policy.step({**params, "free": jnp.array([7.0])}, jnp.ones((4, 3)), ())
    assert parameters.shape == (4, 2) and (parameters[:, 1] == 7.0).all() and value is None


def free(observation, distribution, critic):
    assert (distribution.num_outputs, distribution.num_parameters) == (1, 2) and not critic
    return make_pure_policy(
        lambda key, x: jnp.zeros((3, 1)), lambda params, x: (x @ params, None), observation, distribution, critic
    )


# --- mistakes --------------------------------------------------------------------------------------------------------


def variant(**changes):
    """`linear` with other functions or options."""

    def network(observation, distribution, critic):
        functions = {"init": init, "apply": apply} | changes
        return make_pure_policy(observation=observation, distribution=distribution, critic=critic, **functions)

    return network


class Normed(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(self.num_outputs)(x), nn.Dense(1)(x)[:, 0]


def normed(trainable=None):
    """The module as pure functions."""
    functions = Normed(2).init, Normed(2).apply
    return lambda *arguments: make_pure_policy(*functions, *arguments)._replace(trainable=trainable)


@pytest.mark.parametrize(
    "network, message",
    [
        (Normed, "network=Normed is a module; write a function.*make_pure_policy"),
        (Normed(2), "network=Normed is a module; write a function.*make_pure_policy"),
        (normed(), "network/batch_stats/BatchNorm_0/mean, which is no parameter.*LayerNorm.*trainable"),
        (variant(apply=lambda p, x: (x @ p, x[:, 0])), r"float32\[4, 3\] instead of float32\[4, 2\].* \[N, 2\]"),
        (variant(apply=lambda p, x: ((x @ p[:, :2]).astype("bfloat16"), x[:, 0])), r"bfloat16\[4, 2\] instead of"),
        (variant(apply=lambda p, x: ((x @ p)[:, :2], x[:, :1])), r"values float32\[4, 1\] instead of float32\[4\]"),
        (variant(apply=lambda p, x: ((x @ p)[:, :2], None)), "gives no value, but the algorithm has a critic"),
        (variant(apply=lambda p, x: (x @ p)[:, :2]), "step fails with ValueError"),
        (variant(init=lambda key, x: {}), "init gives {}, which holds no arrays"),
        (variant(init=lambda key, x: {"w": init(key, x), "key": key}), "network/key of type key.* floating-point"),
        (variant(init=lambda key, x: {"w": jnp.tanh}), "init fails with TypeError"),
        (variant(apply=lambda p, x, c: (*apply(p, x), c + 1.5), initial_carry=0), r"int32\[4\], but after it float32"),
        (lambda observation, distribution: None, "fails with TypeError.* takes 2 positional arguments"),
        (lambda *arguments: None, "gives NoneType, but must give a Policy"),
        ("grpo_jax:nothing", "'grpo_jax' has no 'nothing'"),
        (7, "network=7 must be a name"),
        (dataclasses.make_dataclass("Unfrozen", [], namespace={"__call__": linear})(), "cannot be hashed"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong_with_a_network(network, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(network=network, **SMALL))


def test_statistics_that_stay_as_they_are_are_accepted():
    check(Config(network=normed(lambda path: "batch_stats" not in path), **SMALL))


def test_a_baseline_by_features_needs_features():
    algorithm = KERNEL_GAE._replace(baseline=kernel_baseline(metric=policy_features))
    fields = SMALL | {"algorithm": algorithm, "group_size": 2}
    with pytest.raises(ConfigError, match="has no features.*features=.*`observed`"):
        check(Config(network=linear, **fields))
    with pytest.raises(ConfigError, match=r"features are float32\[4, 4\].* \[S, N, F\]"):
        check(Config(network=variant(features=lambda params, x: x[:, 0]), **fields))
    check(Config(network=variant(features=lambda params, x: x @ params), **fields))


# --- distributions ---------------------------------------------------------------------------------------------------


def over_actions(space):
    return categorical(space.num_actions)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"log_prob": lambda parameters, action: action}, r"log_prob gives int32\[3\] instead of float32\[3\]"),
        ({"entropy": lambda parameters: parameters}, r"entropy gives float32\[3, 2\]"),
        ({"mode": lambda parameters: parameters}, r"samples are int32\[3\], but modes float32\[3, 2\]"),
        ({"to_environment": lambda action: action[:, None]}, r"to_environment gives int32\[3, 1\]"),
        ({"num_free": 3}, "num_free=3"),
        ({"kl": lambda parameters: 0.0}, "kl fails with TypeError"),
    ],
)
def test_errors_say_what_is_wrong_with_a_distribution(change, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(action_distribution=lambda space: categorical(2)._replace(**change), **SMALL))


def test_a_distribution_by_its_path():
    path = f"{__name__}:over_actions"
    for family in (path, over_actions):
        assert Config(action_distribution=family, **SMALL).policy.distribution.num_outputs == 2
    with pytest.raises(ConfigError, match="must give a Distribution"):
        Config(action_distribution=lambda space: space, **SMALL)
