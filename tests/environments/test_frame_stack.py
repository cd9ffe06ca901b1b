"""Frame stacking against NumPy, which stacks the observations of the same episode played without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, copy_task, difference, random_policy

from grpo_jax.environments import group_parameters, make_environment, stack_frames
from grpo_jax.environments.frame_stack import unstacked_state
from grpo_jax.errors import ConfigError
from grpo_jax.groups import anchored_groups
from grpo_jax.rollouts.rollout import Simulator

KEY = jax.random.key(3)


class Many(Probe):
    """Observes arrays of every kind. Half of the episodes terminate after five steps, the others are truncated."""

    def step_env(self, key, state, action, params):
        observation, state, reward, _, info = super().step_env(key, state, action, params)
        return observation, state, reward, (state.mark > 0.5) & (state.time >= 5), info

    def get_obs(self, state, params=None, key=None):
        number = 10 * state.mark + state.time
        image = jnp.arange(24).reshape(3, 4, 2) + state.time
        return {
            "vector": number + jnp.arange(2.0),
            "number": number,
            "images": (image.astype(jnp.int8), image[..., 0] > number),
        }

    def action_mask(self, state, params):
        return jnp.stack([state.time % 2 == 0, True])


@pytest.fixture(scope="module")
def plain():
    return make_environment(Many(), {"max_steps_in_episode": 7})


def oracle(episode, num_frames):
    """The last frames of an episode, before which lie copies of the first."""
    episode = [frame[..., None] if frame.ndim in (0, 2) else frame for frame in map(np.asarray, episode)]
    return np.concatenate((episode[:1] * num_frames + episode)[-num_frames:], axis=-1)


@pytest.mark.parametrize("num_frames", [3, 9])
def test_frames_are_those_of_the_episode(plain, num_frames):
    env = stack_frames(plain, num_frames)
    (state, seen), (alone, first) = (each.reset(KEY, each.params) for each in (env, plain))
    (step, plain_step), episode = (jax.jit(each.step) for each in (env, plain)), [first]
    for t in range(7):
        for spec, x, *frames in zip(*map(jax.tree.leaves, (env.observation, seen, *episode)), strict=True):
            assert (x.shape, x.dtype) == (spec.shape, spec.dtype)
            np.testing.assert_array_equal(x, oracle(frames, num_frames))
        assert not difference(env.action_mask(state, env.params), plain.action_mask(alone, plain.params))
        moved, expected = step(KEY, state, t % 2, env.params), plain_step(KEY, alone, t % 2, plain.params)
        assert not difference(moved._replace(state=moved.state.environment, observation=expected.observation), expected)
        state, seen, alone = moved.state, moved.observation, expected.state
        episode.append(expected.observation)


def test_episodes_in_a_rollout_begin_anew_and_a_group_shares_the_frames_of_its_anchor(plain):
    env = stack_frames(plain, 3)
    simulator = Simulator(env, random_policy(env.action_space), (), keep_final=True)

    @jax.jit
    def play(key):
        start = simulator.reset(group_parameters(env, None, 8, 1), key, 8)
        between, trajectory = simulator.unroll(start, key, num_steps=11, auto_reset=True)
        begun = anchored_groups(simulator, between, key, group_size=8)
        keys, actions = jax.random.split(key, 8), jnp.arange(8) % 2
        moved = jax.vmap(env.step)(keys, begun.environment, actions, begun.environment_params)
        return trajectory, *(each.observation["vector"] for each in (between, begun, moved))

    trajectory, last, frames, moved = jax.tree.map(np.asarray, play(KEY))
    seen, ended = trajectory.observation["vector"].reshape(11, 8, 3, 2), trajectory.ended[:-1]
    assert trajectory.terminated.any() and trajectory.truncated.any()
    assert (seen[1:][ended] == seen[1:, :, :1][ended]).all(), "copies of the first"
    np.testing.assert_array_equal(seen[1:, :, :-1][~ended], seen[:-1, :, 1:][~ended])
    final = trajectory.final_observation["vector"].reshape(-1, 8, 3, 2)
    for i, column in enumerate(trajectory.truncated.T):
        for slot, t in enumerate(np.flatnonzero(column)):
            np.testing.assert_array_equal(final[slot, i], [*seen[t, i, 1:], seen[t, i, 2] + 1])
    np.testing.assert_array_equal(final[-1].reshape(8, 6), last)
    assert (frames == frames[0]).all() and (frames[0] == last).all(axis=1).any()
    np.testing.assert_array_equal(moved[:, :-2], frames[:, 2:])


def test_one_frame_is_the_environment_and_tokens_are_not_stacked(plain):
    assert stack_frames(plain, 1) is plain
    state, _ = plain.reset(jax.random.key(0), plain.params)
    stacked, _ = stack_frames(plain, 2).reset(jax.random.key(0), plain.params)
    assert unstacked_state(state) is state and not difference(unstacked_state(stacked), state)
    forcing = plain._replace(forced_action=lambda state, params: state.time + 1)
    assert stack_frames(forcing, 2).forced_action(stacked, plain.params) == 1
    with pytest.raises(ConfigError, match="frame_stack=2 .*'copy' has tokens.*use frame_stack=1"):
        stack_frames(copy_task(), 2)
