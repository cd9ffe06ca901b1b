"""Kept policies: the best rows are copied, files are read back exactly, and mistakes are explained."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits
from saved_policies import edited, save_policies

import grpo_jax
from grpo_jax import GRPO, Config, Hyperparams, evaluate
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.policies.normalization import Normalizer
from grpo_jax.recording.files import read_archive, write_archive
from grpo_jax.recording.policy_saver import PolicySaver
from grpo_jax.recording.trained_policy import TrainedPolicy
from grpo_jax.runs.progress import Chunk
from grpo_jax.runs.result import RunResult
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.training.train import initial_states

SIZES = {"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": MLP((4,))}
CATCH = Config(environment="Catch-bsuite", algorithm="ppo", normalize_observations=True, **SIZES)
OWN = Config(environment=Probe(), algorithm="ppo", **SIZES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    return directory, save_policies(directory, CATCH)


def chunk(returns, counts):
    metrics = {"episode/return_mean": np.array(returns), "episode/count": np.array(counts)}
    return Chunk(metrics, np.zeros(np.shape(returns), np.int64), iteration=0, seconds=0.0)


def test_final_returns_are_of_rows_that_end_at_different_iterations():
    returns = [[9, np.nan, np.nan], [2, 8, np.nan], [np.nan, 7, np.nan]]  # a NaN before the last 100 episodes
    metrics, steps, *_ = chunk(returns, [[9, 90, 0], [1, 50, 0], [0, 50, 0]])
    result = RunResult(None, metrics, steps, 0.0, 0.0, None, None, None)
    np.testing.assert_allclose(result.final_return, [(9 * 9 + 2) / 10, 7.5, np.nan])
    nothing_left = result._replace(metrics={}, steps=steps[:0])
    assert np.isnan(nothing_left.final_return).all() and nothing_left.final_return.shape == (3,)


def test_each_row_keeps_its_best_policy(tmp_path):
    keys, hyperparams = jax.random.split(jax.random.key(0), 3), Hyperparams()
    states = jax.jit(lambda *rows: initial_states(OWN, *rows))(hyperparams, keys)
    plan = RunSpec("run", OWN, hyperparams, keys)

    def at(number, *scores):
        params = jax.tree.map(lambda leaf: jax.device_put(np.full_like(leaf, number)), states.params)
        return states.replace(params=params), np.full(3, number), np.array(scores, float)

    policies = PolicySaver(tmp_path, plan)
    policies.update(*at(0, 1, 5, np.nan))
    policies.update(*at(1, 2, 4, np.nan))
    policies.save(*at(2, 0, np.nan, np.nan))
    policies = PolicySaver(tmp_path, plan, resume=True)
    policies.update(*at(7, 1.5, 9, np.nan))
    policies.save(*at(8, 1, 1, np.nan))
    best = grpo_jax.load(tmp_path, which="best", row="all", config=OWN)
    assert best.steps.tolist() == [1, 7, 8] and best.score.tolist()[:2] == [2, 9]
    assert all((leaf == np.array([1, 7, 8]).reshape(3, *[1] * (leaf.ndim - 1))).all() for leaf in _leaves(best))
    latest = grpo_jax.load(tmp_path, row="all", config=OWN)
    assert all((leaf == 8).all() for leaf in _leaves(latest))


def _leaves(policies):
    return map(np.asarray, jax.tree.leaves(policies.params))


def test_policies_are_read_back_exactly(saved):
    directory, states = saved
    policies = grpo_jax.load(directory, row="all")
    assert policies.config == CATCH and len(policies) == 2
    for part in ("params", "normalizer", "hyperparams"):
        assert bits(getattr(policies, part)) == bits(getattr(states, part))
    assert grpo_jax.load(directory).row == 1, "the best row"
    assert bits(grpo_jax.load(directory, row=0).params) == bits(policies[0].params)
    with pytest.raises(ConfigError, match="policies of 2 rows"):
        policies.act(np.zeros((10, 5)))
    (path,) = directory.glob("policies/*/final.npz")
    arrays = np.load(path)  # as without this package
    assert arrays["params/actor/Dense_0/kernel"].shape == (2, 50, 4)
    assert arrays["score"].tolist() == [1.0, 2.0] and arrays["hyperparams/learning_rate"].tolist() == [1.0, 2.0]


def test_another_run_starts_from_them(saved):
    grpo = dataclasses.replace(CATCH, algorithm="grpo", num_steps=None, group_size=2)
    policies = grpo_jax.load(saved[0], row="all", config=grpo)
    assert bits(policies.params) == bits({"actor": saved[1].params["actor"]})
    start = functools.partial(initial_states, grpo, Hyperparams(), params=policies.params)
    keys = jax.random.split(jax.random.key(3), 2)
    states = jax.jit(start)(keys, normalizer=policies.normalizer)
    assert bits((states.params, states.normalizer)) == bits((policies.params, policies.normalizer))
    with pytest.raises(ConfigError, match=r"normalizer has statistics of observations None, but they are .* in this"):
        jax.eval_shape(start, keys, normalizer=Normalizer(None, None))


def test_one_line_acts(saved):
    policy, observations = grpo_jax.load(saved[0]), np.random.default_rng(0).uniform(size=(20, 10, 5))
    greedy = policy.act(observations)
    assert greedy.shape == (20,) and policy.act(observations[0]) == greedy[0] and len(set(greedy.tolist())) > 1
    assert (policy.act(observations, jax.random.key(0)) != greedy).any()
    assert (policy.act(observations, action_mask=np.tile([False, True, False], (20, 1))) == 1).all()
    assert policy.act(observations[0], action_mask=np.array([False, False, True])) == 2


def test_what_is_no_observation_is_refused(saved):
    policy = grpo_jax.load(saved[0])
    assert policy.act([[0.0] * 5] * 10) == policy.act(np.zeros((10, 5)))
    assert policy.act(np.zeros((10, 5)), action_mask=[False, False, True]) == 2
    for wrong in ({"pixels": np.zeros((10, 5))}, None, np.zeros((0, 10, 5)), np.zeros((10, 4)), np.zeros(4), "image"):
        with pytest.raises(ConfigError, match=r"an observation of 'Catch-bsuite' .* but was given"):
            policy.act(wrong)
    for mask in (np.ones(4, bool), np.ones(3), True):
        with pytest.raises(ConfigError, match="action_mask is .* give a bool for each discrete action"):
            policy.act(np.zeros((10, 5)), action_mask=mask)
    with pytest.raises(ConfigError, match=r"action_mask is bool\[1, 3\]"):
        policy.act(np.zeros((4, 10, 5)), action_mask=np.ones((1, 3), bool))


@pytest.mark.parametrize("recurrent", ["gru", pytest.param("mingru", marks=pytest.mark.slow)])
def test_a_carry_is_for_as_many_as_there_are(recurrent):
    config = Config(environment=Probe(), **SIZES | {"network": MLP((4,), recurrent=recurrent, recurrent_size=6)})
    shapes = jax.eval_shape(config.policy.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    parts = params, Normalizer(None, None), Hyperparams(), {}, np.float32(0), np.int64(0), np.int32(0)
    policy, observations = TrainedPolicy("run", config, *parts), np.zeros((5, 2), np.float32)
    actions, after = policy.act(observations, carry=policy.initial_carry(5))
    assert actions.shape == (5,) and jax.tree.leaves(after)[0].shape == (5, 6)
    with pytest.raises(ConfigError, match=r"the carry contains float32\[1, 6\], .* policy.initial_carry\(5\)"):
        policy.act(observations, carry=policy.initial_carry())
    with pytest.raises(ConfigError, match=r"float32\[5, 6\], but a batch of 1 .* policy.initial_carry\(1\)"):
        policy.act(observations[0], carry=after)


def test_a_policy_is_evaluated_as_the_state_it_came_from(saved):
    policy, key = grpo_jax.load(saved[0], row=0), jax.random.key(2)

    @jax.jit
    def play(policy, state, key):
        return [evaluate(CATCH, state, key, num_episodes=8) for state in (policy.state(key), state)]

    one, other = play(policy, jax.tree.map(lambda leaf: leaf[0], saved[1]), key)
    assert bits(one) == bits(other)


def test_a_policy_plays_in_other_environments(saved, tmp_path):
    policies = grpo_jax.load(saved[0], row="all")
    with pytest.raises(ConfigError, match="'CartPole-v1' has the observation"):
        policies.on("CartPole-v1")
    config = Config(environment="CartPole-v1", algorithm="grpo", num_envs=8, group_size=4, network=MLP((4,)))
    save_policies(tmp_path, config, env_params={"gravity": np.array([9.0, np.inf])})
    policies = grpo_jax.load(tmp_path, row="all")
    assert policies.config == config and policies.env_params["gravity"].tolist() == [9.0, np.inf]
    longer = policies.on(env_params={"max_steps_in_episode": 700})
    assert longer.config.env.max_steps == 700 and "gravity" in longer.env_params
    assert policies.on(env_params={"gravity": 5.0}).env_params == {}


def test_a_config_that_json_cannot_express_is_asked_for(tmp_path):
    own = GRPO._replace(surrogate=lambda log_ratio, advantage, hyperparams: log_ratio * advantage)
    schedule = functools.partial(pow, 0.5)
    config = Config(Probe(), own, num_envs=4, num_minibatches=1, network=MLP((4,)), schedule=schedule)
    save_policies(tmp_path, config)
    with pytest.raises(ConfigError, match=r"environment, algorithm, schedule.*load\(folder, config=my_config\)"):
        grpo_jax.load(tmp_path)
    assert grpo_jax.load(tmp_path, config=config).config is config


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"folder": "elsewhere"}, "there is no folder"),
        ({"run": "PPO"}, "no run 'PPO'.*run on Catch-bsuite"),
        ({"row": 2}, "row=2, .* the rows 0 to 1"),
        ({"which": "last"}, "which='last' is unknown"),
        ({"config": dataclasses.replace(CATCH, network=MLP((5,)))}, r"is \[2, 4\] in .*, but \[2, 5\].* another env"),
    ],
)
def test_mistakes_are_explained(saved, arguments, message):
    with pytest.raises(ConfigError, match=message):
        grpo_jax.load(**{"folder": saved[0]} | arguments)


def test_damaged_files_and_other_formats_are_refused(tmp_path):
    save_policies(tmp_path, CATCH)
    save_policies(tmp_path, CATCH, label="another")
    with pytest.raises(ConfigError, match="several runs: 'another on Catch-bsuite', 'run on"):
        grpo_jax.load(tmp_path)
    folder = tmp_path / "policies" / "another_on_Catch-bsuite"
    file = folder / "final.npz"
    whole = file.read_bytes()
    place = len(whole) // 2  # in an array
    for broken in (whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], whole[:100], b""):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match=f"{file} is damaged"):
            grpo_jax.load(tmp_path, "another")
    file.write_bytes(whole)
    edited(file, lambda fields: fields | {"format": 2})
    with pytest.raises(ConfigError, match="format 2, .* reads format 4: .* another version .*grpo-jax"):
        grpo_jax.load(folder)


def test_half_precision_is_kept(tmp_path):
    arrays = {"params/weight": np.ones((2, 3), jnp.bfloat16), "empty": np.zeros((2, 0), np.float32)}
    write_archive(tmp_path / "file", {"one": 1}, arrays)
    (tmp_path / "usual").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode
    fields, found = read_archive(tmp_path / "file", {"one": int})
    assert bits(found) == bits(arrays) and fields["one"] == 1
