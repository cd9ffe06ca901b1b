"""Beyond the slots: features and parameters in penalties, more numbers kept at each step, own metrics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from probes import Probe, check
from small import begin, minibatch_gradient

from grpo_jax import GRPO, PPO, Config, Hyperparams, make_train_step
from grpo_jax.errors import ConfigError
from grpo_jax.objectives import group_centered, outcome, with_hyperparams
from grpo_jax.policies import make_pure_policy
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state
from grpo_jax.updates.batch import make_batch

SMALL = {"num_envs": 8, "group_size": 4, "num_minibatches": 1}


@struct.dataclass
class OwnHyperparams(Hyperparams):
    """With two coefficients of variants."""

    auxiliary_coef: float = 2.0
    power: float = 3.0


class Reporting(Probe):
    """A `Probe` whose info has the age after the step, and things that no array holds."""

    def step_env(self, key, state, action, params):
        *step, _ = super().step_env(key, state, action, params)
        return *step, {"age": step[1].time, "name": "probe", "parts": [None]}


def network(observation, distribution, critic):
    def init(key, observation):
        return {"body": jax.random.normal(key, (2, 3)), "actor": jnp.ones((3, 2)), "head": jnp.arange(3.0)}

    def features(params, observation):
        return jnp.tanh(observation @ params["body"])

    def apply(params, observation):
        return features(params, observation) @ params["actor"], None

    return make_pure_policy(init, apply, observation, distribution, critic, features=features)


def rolled_out(**fields):
    """A config, its state at the start, and one rollout's trajectory and batch."""
    config = Config(**SMALL | fields)

    @jax.jit
    def play(key):
        state = initial_state(config, key, OwnHyperparams())
        simulator = Simulator(config.env, config.policy, state.params, plan=config.plan)
        _, trajectory = collect(config, simulator, state.rollout, key, key)
        return state, trajectory, make_batch(config, config.policy, state, trajectory, state.hyperparams)

    return config, *play(jax.random.key(0))


def test_a_penalty_may_be_any_loss_of_features_and_parameters():
    def auxiliary(prediction, batch, *, auxiliary_coef):
        return auxiliary_coef * (prediction.features @ prediction.params["network"]["head"] - 1.0) ** 2

    penalties = (with_hyperparams(auxiliary, "auxiliary_coef"),)
    slots = {"penalties": penalties, "surrogate": lambda log_ratio, *_: 0.0 * log_ratio}
    config, state, _, batch = rolled_out(environment=Probe(), algorithm=GRPO._replace(**slots), network=network)
    everything = jnp.arange(batch.mask.shape[1])
    total, _, gradient = jax.jit(
        lambda params: minibatch_gradient(config, config.policy, params, batch, everything, state.hyperparams)
    )(state.params)
    params = jax.tree.map(np.float64, state.params["network"])
    x = np.tanh(np.float64(batch.observation[0]) @ params["body"])
    error = x @ params["head"] - 1.0
    mask = np.asarray(batch.mask[0])
    np.testing.assert_allclose(total, 2 * np.mean(error[mask] ** 2), rtol=1e-5)
    expected = 2 * np.mean(2 * error[mask, None] * x[mask], axis=0)
    np.testing.assert_allclose(gradient["network"]["head"], expected, rtol=1e-4)
    assert gradient["network"]["body"].any() and not gradient["network"]["actor"].any()


@pytest.mark.parametrize("plan", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_rollouts_keep_entries_of_the_info(plan):
    seen = {"environment": Reporting(), "extras": ("age",)}
    _, _, trajectory, batch = rolled_out(**seen, execution_plan=plan)
    assert rolled_out(environment=Reporting())[2].extras is None, "nothing is kept unless asked"
    assert trajectory.extras["age"].shape == trajectory.reward.shape == (3, 8)
    valid = np.asarray(trajectory.valid)
    assert (np.asarray(trajectory.extras["age"])[valid] == np.asarray(trajectory.episode_length)[valid]).all()
    mask, age = np.asarray(batch.mask), np.asarray(batch.observation[..., 0])
    assert np.array_equal(np.asarray(batch.extras["age"])[mask], age[mask] + 1)


# --- hyperparameters in every slot -----------------------------------------------------------------------------------


def powered(scores, *, power):
    return group_centered(scores) ** power


def test_the_formula_of_an_outcome_may_be_tuned():
    slots = {"advantage": outcome(with_hyperparams(powered, "power"))}
    _, _, trajectory, batch = rolled_out(
        environment=Probe(), env_params={"bonus": 1.0}, algorithm=GRPO._replace(**slots)
    )
    scores = np.asarray(trajectory.reward.sum(axis=0)).reshape(2, 4)
    expected = (scores - scores.mean(axis=1, keepdims=True)) ** 3
    assert expected.any()
    np.testing.assert_allclose(batch.advantage.reshape(3, 8)[0].reshape(2, 4), expected, rtol=1e-5)


def rewarded(trajectory, batch, hyperparams):
    reward = jnp.sum(trajectory.reward, where=trajectory.valid)
    return {"mine/reward": reward, "mine/samples": jnp.sum(batch.mask), "mine/discount": hyperparams.discount}


@pytest.mark.parametrize("algorithm", [GRPO, pytest.param(PPO, marks=pytest.mark.slow)], ids=["grpo", "ppo"])
def test_own_metrics_join_the_others_and_change_nothing(algorithm):
    def cubed(trajectory, batch, *, power):
        return {"mine/power": power, "mine/true": True}

    base = Config(environment=Probe(), algorithm=algorithm, num_steps=3 if algorithm is PPO else None, **SMALL)
    own = dataclasses.replace(base, algorithm=algorithm._replace(metrics=(rewarded, with_hyperparams(cubed, "power"))))
    check(own, OwnHyperparams())
    state = begin(base, OwnHyperparams())
    (before, known), (after, metrics) = (jax.jit(make_train_step(config))(state) for config in (base, own))
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    mine = {name: metrics[name] for name in metrics.keys() - known.keys()}
    assert {(value.shape, value.dtype.name) for value in mine.values()} == {((), "float32")}
    assert mine.pop("mine/discount") == np.float32(0.99)
    assert mine == {
        "mine/power": 3,
        "mine/true": 1,
        "mine/reward": 8 * metrics["episode/return_mean"],
        "mine/samples": 24,
    }


# --- refusals ---------------------------------------------------------------------------------------------------------


def auxiliary(prediction, batch, hyperparams):
    return prediction.features[..., 0]


def without_features(observation, distribution, critic):
    return network(observation, distribution, critic)._replace(features=None)


def giving(metrics):
    return {"algorithm": GRPO._replace(metrics=(lambda *_: metrics,))}


MISSING = GRPO._replace(advantage=outcome(with_hyperparams(powered, "power")))
REFUSED = [
    (
        {"algorithm": GRPO._replace(penalties=(auxiliary,)), "network": without_features},
        "do not fit: this policy.*has no features; give make_pure_policy features=",
    ),
    ({"environment": Reporting(), "extras": ("ages",)}, "extras: the info of 'Probe' has no 'ages': did you mean"),
    ({"algorithm": MISSING}, r"with_hyperparams\(\w+:powered, .power.\) needs the hyperparameter .power., which H"),
    ({"algorithm": GRPO._replace(metrics=(rewarded, rewarded))}, "rewarded gives 'mine/reward', but another metric"),
    ({"algorithm": GRPO._replace(metrics=(lambda trajectory: {},))}, r"fills the slot metrics, which is called as f\("),
    ({"algorithm": GRPO._replace(baseline=lambda *_: (0.0,))}, "the slot 'baseline' should .*not 1 results"),
    (giving(3.0), "metrics=.*gives float; return a dict such as"),
    (giving({"loss": 1.0}), "the name 'loss'; use a prefix of your own"),
    (giving({"setting/discount": 1.0}), "the name 'setting/discount'"),
    (giving({"policy/entropy": 1.0}), "another metric has this name"),
    (giving({"mine/rewards": jnp.zeros(3)}), r"float32\[3\]; return a scalar"),
    (giving({"mine/word": "much"}), "'much'; return a scalar"),
]


@pytest.mark.parametrize("fields, message", REFUSED)
def test_what_slots_cannot_do_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(**{"environment": Probe()} | SMALL | fields))


def test_a_hyperparameter_of_a_subclass_and_an_entry_of_the_info_are_read():
    def of_age(prediction, batch, hyperparams):
        return batch.extras["age"] * prediction.log_prob

    algorithm = MISSING._replace(penalties=(of_age,))
    check(Config(environment=Reporting(), extras=("age",), algorithm=algorithm, **SMALL), OwnHyperparams())
