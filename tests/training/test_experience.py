"""Groups at any state: where they start, what they share, and which of them are learnt from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, acted, bits, known_params, known_policy

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import DR_GRPO, GRPO, GRPO_RETURN_TO_GO, SAME_STEP_GAE, with_reference
from grpo_jax.environments import group_parameters, make_environment
from grpo_jax.groups import ANCHORED, anchored_groups, forked
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect, kept_groups
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state
from grpo_jax.types import Trajectory
from grpo_jax.updates.batch import live_groups, make_batch

CARTPOLE = {"environment": "CartPole-v1", "network": MLP((4,)), "num_epochs": 1, "num_minibatches": 1}
ANCHORED_GRPO = GRPO_RETURN_TO_GO._replace(start=ANCHORED)


def playing(algorithm, **settings):
    """A configuration, and the third of three rollouts that follow each other: where it ended, and what it saw."""
    config = Config(algorithm=algorithm, **CARTPOLE | settings)

    @jax.jit
    def play(key):
        state = initial_state(config, key, Hyperparams(discount=0.9))

        def iteration(rollout, key):
            keys = jax.random.split(key)
            simulator = Simulator(config.env, config.policy, state.params, state.hyperparams.discount)
            return collect(config, simulator, rollout, *keys)

        end, trajectories = jax.lax.scan(iteration, state.rollout, jax.random.split(key, 3))
        return end, jax.tree.map(lambda leaf: leaf[-1], trajectories)

    return config, *jax.device_get(play(jax.random.key(3)))


def at_reset(simulator, key, num_groups, group_size):
    """The states that rollouts start from."""

    @jax.jit
    def reset(key):
        params = group_parameters(simulator.environment, None, num_groups, group_size)
        return simulator.reset(params, key, num_groups * group_size, group_size=group_size)

    return reset(key)


@pytest.fixture(scope="module")
def anchored():
    """Two windows of eight steps with a memory: 4 groups of 4, regrouped in mid-episode."""
    sizes = {"num_envs": 16, "group_size": 4, "num_steps": 16, "regroup_every": 8}
    return playing(ANCHORED_GRPO, **sizes, network=MLP(recurrent="gru", recurrent_size=3))


@pytest.fixture(scope="module")
def vine():
    """Forks after every 5 steps, branches of 12."""
    return playing(GRPO._replace(start=forked(5)), num_envs=16, group_size=4, num_steps=12)


def members(tree, axis, group_size=4):
    """Each leaf with its environments as [num_groups, group_size] in front."""
    return jax.tree.map(
        lambda leaf: np.moveaxis(np.asarray(leaf), axis, 0).reshape(-1, group_size, *np.delete(leaf.shape, axis)), tree
    )


@pytest.mark.parametrize("kind", ["anchored", "vine"])
def test_members_start_bitwise_equal_in_mid_episode(kind, request):
    config, _, trajectory = request.getfixturevalue(kind)
    assert trajectory.reward.shape == (config.window_steps, config.num_windows * 16)
    first = jax.tree.map(lambda leaf: leaf[0], (trajectory.observation, trajectory.episode_length, trajectory.carry))
    for leaf in jax.tree.leaves(members(first, axis=0)):
        assert np.array_equal(leaf, np.broadcast_to(leaf[:, :1], leaf.shape))
    assert (trajectory.episode_length[0] > 1).any(), "in the middle of an episode"
    assert len(np.unique(trajectory.observation[0], axis=0)) == config.num_windows * 4
    actions = members(trajectory.action, axis=1)
    assert all(len({member.tobytes() for member in group}) > 1 for group in actions)


def test_a_memory_is_that_of_the_member_whose_place_is_taken(anchored):
    _, _, trajectory = anchored
    (carry,) = jax.tree.leaves(trajectory.carry)
    mid_episode = np.asarray(trajectory.episode_length[0] > 1)
    assert (np.abs(carry[0]).sum(-1) > 0).tolist() == mid_episode.tolist()


def test_windows_follow_each_other(anchored):
    """The second window of a group begins where the first one of a member ended."""
    config, end, trajectory = anchored
    first, second = (jax.tree.map(lambda leaf, w=w: leaf[:, 16 * w : 16 * w + 16], trajectory) for w in (0, 1))
    last = members(np.where(first.ended[-1], 0, first.episode_length[-1]), axis=0)
    begun = members(second.episode_length[0] - 1, axis=0)[:, 0]
    assert all(age in ages for age, ages in zip(begun, last, strict=True))
    assert np.array_equal(end.episode_length, np.where(second.ended[-1], 0, second.episode_length[-1]))


def test_anchors_are_drawn_uniformly_and_whole():
    """The place of each member is taken equally often: the marginal distribution of states is that of going on."""
    env = make_environment("CartPole-v1")
    simulator = Simulator(env, known_policy, None)
    state = at_reset(simulator, jax.random.key(0), 12, 1)
    state = state._replace(episode_length=jnp.arange(12), discounted_return=jnp.arange(12.0))
    draw = jax.jit(jax.vmap(lambda key: anchored_groups(simulator, state, key, 4)))
    taken, state = jax.device_get((draw(jax.random.split(jax.random.key(1), 4000)), state))
    ages = taken.episode_length.reshape(4000, 3, 4)
    assert np.array_equal(ages, np.broadcast_to(ages[..., :1], ages.shape))
    assert np.array_equal(taken.discounted_return, taken.episode_length)
    assert np.array_equal(taken.observation, state.observation[taken.episode_length])
    counts = np.stack([np.bincount(ages[:, g, 0] - 4 * g, minlength=4) for g in range(3)])
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9, "chi-square of 9 degrees of freedom, p = 0.001"


def test_forks_count_their_lead_and_the_trunk_goes_on(vine):
    config, end, trajectory = vine
    assert config.steps_per_iteration == 16 * 12 + 4 * 5
    assert np.array_equal(end.episode_length + 1, trajectory.episode_length[0])
    assert np.array_equal(end.observation, trajectory.observation[0])
    alive = np.cumprod(~np.asarray(trajectory.ended), axis=0)
    assert np.array_equal(trajectory.valid[1:], alive[:-1]), "branches end with their episode"


def test_the_trunk_moves_by_the_lead():
    start, env = forked(3), make_environment(Probe(), {"max_steps_in_episode": 50})
    simulator = Simulator(env, known_policy, known_params((0.0, 0.0)), discount=0.5)
    state = at_reset(simulator, jax.random.key(0), 4, 1)
    begun = jax.jit(lambda state, key: start.begin(simulator, state, key, 2))(state, jax.random.key(1))
    assert begun.episode_length.tolist() == [3] * 4
    assert begun.discounted_return.tolist() == [1.75] * 4
    assert np.array_equal(begun.observation[:, 1], state.observation[jnp.array([0, 0, 2, 2]), 1])


def test_a_baseline_sees_one_window_at_a_time(anchored):
    """What is paid in the second window moves no value of the first, not even of another environment."""
    _, _, trajectory = anchored
    algorithm = SAME_STEP_GAE._replace(baseline=mean_of_others)
    sizes = {"num_envs": 16, "group_size": 4, "num_steps": 16, "regroup_every": 8}
    config = Config(environment=Probe(), algorithm=algorithm, **sizes)

    @jax.jit
    def advantages(trajectory):
        return make_batch(config, known_policy, acted(None), trajectory, Hyperparams()).advantage

    trajectory = trajectory._replace(final_observation=trajectory.observation[:1], carry=())
    changed = trajectory._replace(reward=trajectory.reward + 5.0 * (np.arange(32) >= 16))
    before, after = (np.reshape(advantages(each), (8, 2, 16)) for each in (trajectory, changed))
    assert np.array_equal(before[:, 0], after[:, 0]) and not np.allclose(before[:, 1], after[:, 1])


def mean_of_others(trajectory, policy, params, hyperparams, group_size):
    """Of all environments that it is shown."""
    value = jnp.full(trajectory.reward.shape, jnp.mean(trajectory.reward))
    return value, value[:1]


def test_rounding_in_a_baseline_is_no_advantage(anchored):
    """A minibatch with nothing else would be scaled up to the size of all others, and train on noise."""
    _, _, trajectory = anchored
    config = {"environment": Probe(), "num_envs": 32, "group_size": 4, "num_steps": 8}
    shape = trajectory.reward.shape
    noise, everywhere = np.random.default_rng(0).normal(size=shape).astype(np.float32), np.ones(shape, bool)
    noise[0] = [np.nan, 1e6, *[0.1] * 30]
    trajectory = trajectory._replace(final_observation=trajectory.observation[:1], carry=(), terminated=everywhere)

    @jax.jit
    def advantages(value, **fields):
        algorithm = SAME_STEP_GAE._replace(baseline=lambda *_: (value, value[:1]))
        rollout, made = trajectory._replace(**fields), Config(algorithm=algorithm, **config)
        return make_batch(made, known_policy, acted(None), rollout, Hyperparams()).advantage.reshape(8, 32)

    nearly = noise * np.float32(1 + 2 * np.finfo(np.float32).eps)
    nearly[1] += 0.03
    advantage = advantages(nearly, reward=noise)
    assert np.isnan(advantage[0, 0]) and not advantage[0, 1:].any() and not advantage[2:].any()
    np.testing.assert_allclose(advantage[1], -0.03, rtol=1e-3)
    # Neither steps that do not count nor infinite values hide an advantage.
    valid, reward = everywhere & (np.arange(8) != 6)[:, None], np.ones(shape, np.float32)
    value = np.where(valid, reward - np.float32(1e-3), np.float32(1e30))
    value[7] = np.inf
    advantage = advantages(value, reward=reward, valid=valid)
    np.testing.assert_allclose(advantage[:5], 1e-3, rtol=1e-3)
    assert (advantage[7] == -np.inf).all(), "an update that is not finite is noticed"


# --- which groups are learnt from ------------------------------------------------------------------------------------


def test_groups_are_kept_by_how_much_their_members_differ():
    sizes = {"num_envs": 16, "group_size": 4, "num_kept_groups": 2, "num_steps": 20}
    kept_of = jax.jit(functools.partial(kept_groups, Config(algorithm=ANCHORED_GRPO, **CARTPOLE | sizes)))

    def kept(scores):
        reward = np.zeros((20, 16), np.float32)
        reward[0] = scores
        rollout = Trajectory(**dict.fromkeys(Trajectory._fields))
        return kept_of(rollout._replace(reward=reward, valid=np.ones((20, 16), bool), observation=np.arange(16)[None]))

    both = kept([5] * 4 + [0, 0, 0, 9] + [1, 0, 1, 0] + [0, 4, 0, 4])
    assert both.reward[0].tolist() == [0, 0, 0, 9, 0, 4, 0, 4]
    assert both.observation[0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    lost = kept([3e5 + 1 / 3] * 4 + [0, np.nan, 0, 9] + [1, 0, 1, 0] + [0, 4, 0, 4])
    assert lost.reward[0].tolist() == [0, 4, 0, 4, 1, 0, 1, 0], "neither what is not finite nor what is all the same"


def test_kept_groups_differ_in_the_rewards_of_training():
    """In one group actions pay 1 and 10, both of which are clipped to 1; in the other 1 and 0.5."""
    fields = {"environment": Probe(), "num_envs": 8, "group_size": 4, "num_kept_groups": 1}
    config, hyperparams = Config(algorithm=DR_GRPO, **CARTPOLE | fields), Hyperparams(reward_clip=1.0)
    state = jax.jit(make_init(config))(jax.random.key(0), hyperparams, {"bonus": jnp.array([9.0, -0.5])})
    state, metrics = jax.jit(make_train_step(config))(state)
    assert metrics["episode/return_max"] > 3 and metrics["advantage/abs_mean"] > 0


def test_live_groups_have_an_advantage_somewhere():
    advantage = jnp.zeros((3, 6)).at[1, 2].set(1.0).at[2, 5].set(1.0)
    mask = jnp.ones((3, 6), bool).at[2, 5].set(False)
    assert live_groups(advantage, mask, 2).tolist() == [False, False, True, True, False, False]


def test_without_a_live_group_the_parameters_stay_bitwise():
    """The reference pulls at every group otherwise, and Adam's momentum at every update."""
    algorithm = with_reference(GRPO)._replace(live_groups_only=True)
    settings = CARTPOLE | {"environment": Probe()}
    config = Config(algorithm=algorithm, num_envs=8, group_size=4, **settings)
    step = jax.jit(make_train_step(config))
    state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams(kl_coef=1.0))
    moved = jax.tree.map(lambda leaf: leaf + 0.1, state.params)
    momentum = jax.tree.map(lambda x: x + 0.1 if jnp.issubdtype(x.dtype, jnp.floating) else x, state.opt_state)
    after, metrics = step(state.replace(params=moved, opt_state=momentum))
    assert metrics["group/zero_variance_fraction"] == 1
    assert bits(after.params) == bits(moved)
