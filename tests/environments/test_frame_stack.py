"""Frame stacking against NumPy, which stacks the observations of the same episodes played without it."""

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

NUM_ENVS, NUM_STEPS = 4, 11


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


def play(env):
    """The state after a rollout, and the trajectories of that and of the next one, with final observations."""
    simulator = Simulator(env, random_policy(env.action_space), (), keep_final=True)

    @jax.jit
    def both(key):
        start = simulator.reset(group_parameters(env, None, NUM_ENVS, 1), key, NUM_ENVS)
        options = {"num_steps": NUM_STEPS, "auto_reset": True}
        between, first = simulator.unroll(start, jax.random.fold_in(key, 1), **options)
        _, second = simulator.unroll(between, jax.random.fold_in(key, 2), **options)
        return between, first, second

    return both(jax.random.key(3))


@pytest.fixture(scope="module", params=[3, pytest.param(9, marks=pytest.mark.slow)])
def stacked(request, plain):
    """The number of frames, the environment with so many, and its two rollouts."""
    env = stack_frames(plain, request.param)
    return request.param, env, play(env)


def oracle(frames, age, num_frames):
    """The last of `frames`, which its episode has reached at this age, with those before it in the episode."""
    episode = [np.asarray(frame) for frame in frames[-age - 1 :]]
    episode = [frame[..., None] if frame.ndim in (0, 2) else frame for frame in episode]
    return np.concatenate((episode[:1] * num_frames + episode)[-num_frames:], axis=-1)


def test_frames_are_those_of_the_episode(plain, stacked):
    num_frames, env, (_, *rollouts) = stacked
    _, *expected = play(plain)
    hidden = {"observation": None, "final_observation": None}
    for one, other in zip(expected, rollouts, strict=True):
        assert not difference(one._replace(**hidden), other._replace(**hidden)), "rewards, ends and masks are the same"
    assert expected[1].truncated.any() and expected[1].terminated.any()

    lengths, ended, truncated = (
        np.concatenate([getattr(part, name) for part in expected]) for name in ("episode_length", "ended", "truncated")
    )
    specs = jax.tree.leaves(env.observation)
    observed, actual = (
        jax.tree.leaves(jax.tree.map(lambda *x: np.concatenate(x), *(part.observation for part in parts)))
        for parts in (expected, rollouts)
    )
    finals = (jax.tree.leaves(part.final_observation) for part in (expected[1], rollouts[1]))
    for spec, frames, x, final_frames, final_x in zip(specs, observed, actual, *finals, strict=True):
        assert (x.shape[2:], x.dtype) == (spec.shape, spec.dtype)
        for i in range(NUM_ENVS):
            for t in range(2 * NUM_STEPS):
                np.testing.assert_array_equal(x[t, i], oracle(frames[: t + 1, i], lengths[t, i] - 1, num_frames))
            # Slot n has the final observation of the n-th truncated episode, the last slot that after the last step.
            for slot, t in enumerate(NUM_STEPS + np.flatnonzero(truncated[NUM_STEPS:, i])):
                history = [*frames[: t + 1, i], final_frames[slot, i]]
                np.testing.assert_array_equal(final_x[slot, i], oracle(history, lengths[t, i], num_frames))
            history, age = [*frames[:, i], final_frames[-1, i]], lengths[-1, i] * ~ended[-1, i]
            np.testing.assert_array_equal(final_x[-1, i], oracle(history, age, num_frames))


def test_a_group_in_mid_episode_shares_the_frames_of_its_anchor(stacked):
    _, env, (between, *_) = stacked
    simulator = Simulator(env, random_policy(env.action_space), ())

    @jax.jit
    def play(state, key):
        begun = anchored_groups(simulator, state, key, group_size=NUM_ENVS)
        keys, actions = jax.random.split(key, NUM_ENVS), jnp.arange(NUM_ENVS) % 2
        moved = jax.vmap(env.step)(keys, begun.environment, actions, begun.environment_params)
        return begun.observation["vector"], moved

    frames, moved = jax.tree.map(np.asarray, play(between, jax.random.key(0)))
    assert (frames == frames[0]).all() and (frames[0] == between.observation["vector"]).all(axis=1).any()
    np.testing.assert_array_equal(moved.observation["vector"][:, :-2], frames[:, 2:])


def test_one_frame_is_the_environment_and_tokens_are_not_stacked(plain):
    assert stack_frames(plain, 1) is plain
    state, _ = plain.reset(jax.random.key(0), plain.params)
    stacked, _ = stack_frames(plain, 2).reset(jax.random.key(0), plain.params)
    assert unstacked_state(state) is state and not difference(unstacked_state(stacked), state)
    with pytest.raises(ConfigError, match="frame_stack=2 .*'copy' has tokens.*use frame_stack=1"):
        stack_frames(copy_task(), 2)
