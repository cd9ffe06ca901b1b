"""The lean step of Asterix is gymnax's, bit for bit: random play with resets from the same keys, also with other
parameters than the defaults."""

import functools
import re

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.minatar.asterix import MinAsterix

from grpo_jax.environments.lean import Lean
from grpo_jax.environments.registry import environment_object

OTHER_PARAMETERS = {"ramping": False, "init_spawn_speed": 3, "init_move_interval": 2, "max_steps_in_episode": 37}
"""With these, what is rare by default happens often."""


def test_the_name_has_the_lean_step_and_gymnax_s_stays_at_hand():
    assert type(environment_object("Asterix-MinAtar")) is Lean
    theirs = gymnax.make("Asterix-MinAtar")[0]
    assert environment_object(theirs) is theirs


def pair(**options):
    """gymnax's environment and the lean one."""
    return MinAsterix(**options), Lean(**options)


def play(env, params, key, num_steps):
    """Observations, states, rewards, ends and infos of random play with auto-reset.

    In half of the steps the player goes up.
    """
    up = 2 if env.num_actions == 6 else 1

    def step(state, key):
        key_action, key_step, key_reset = jax.random.split(key, 3)
        drawn = jax.random.randint(key_action, (), 0, 2 * env.num_actions)
        action = jnp.where(drawn < env.num_actions, drawn, up)
        observation, after, reward, terminated, info = env.step_env(key_step, state, action, params)
        done = terminated | env.is_truncated(after, params)
        fresh = env.reset_env(key_reset, params)[1]
        following = jax.tree.map(lambda fresh, after: jnp.where(done, fresh, after), fresh, after)
        following = jax.tree.map(lambda new, old: new.astype(old.dtype), following, state)
        return following, (observation, after, reward, terminated, info)

    observation, state = env.reset_env(key, params)
    state = jax.tree.map(jnp.asarray, state)
    return observation, jax.lax.scan(step, state, jax.random.split(key, num_steps))[1]


def in_turn(function):
    """Like `jax.vmap`, in a program that is compiled sooner."""
    return functools.partial(jax.lax.map, function)


def assert_same_play(gymnax_env, ours, params, num_envs, num_steps, rounds=1, mapped=jax.vmap):
    exactly, leanly = (jax.jit(mapped(lambda key, e=e: play(e, params, key, num_steps))) for e in (gymnax_env, ours))
    for key in jax.random.split(jax.random.key(1), rounds):  # one after the other: observations take much memory
        keys = jax.random.split(key, num_envs)
        exact, same = exactly(keys), leanly(keys)
        assert jax.tree.structure(exact) == jax.tree.structure(same)
        for (path, a), b in zip(jax.tree.leaves_with_path(exact), jax.tree.leaves(same), strict=True):
            np.testing.assert_array_equal(a, b, jax.tree_util.keystr(path))
    return exact


def test_ten_thousand_steps_are_the_same_bits():
    envs = pair()
    _, (_, _, reward, terminated, _) = assert_same_play(*envs, envs[0].default_params, 20, 500, mapped=in_turn)
    assert (reward > 0).any() and terminated.any()


@pytest.mark.slow
@pytest.mark.parametrize("minimal", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_a_million_steps_are_the_same_bits(minimal, other):
    envs = pair(use_minimal_action_set=minimal)
    params = envs[0].default_params.replace(**OTHER_PARAMETERS if other else {})
    assert_same_play(*envs, params, 100, 2000, rounds=5)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("wide", [False, True])
def test_a_lean_step_has_gymnax_s_types_but_neither_loops_nor_sorts_nor_gathers(wide):
    """Also in double precision."""
    programs, found = [], []
    with jax.enable_x64(wide):
        key, envs = jax.random.key(0), pair()
        state = jax.eval_shape(envs[0].reset_env, key, envs[0].default_params)[1]
        for env in envs:
            start, params = jax.eval_shape(env.reset_env, key, env.default_params), env.default_params
            by_number = jax.eval_shape(functools.partial(env.step_env, action=1, params=params), key, state)
            found.append((types(start), types(by_number)))
            with jax.numpy_rank_promotion("raise" if len(found) == 2 else "allow"):
                programs.append(str(jax.make_jaxpr(env.step_env)(key, state, 0, params)))
    assert found[0] == found[1]
    exact, ours = (re.findall(r"= (while|scan|sort|scatter|gather|dynamic_slice)\b", each) for each in programs)
    assert "scatter" in exact and not ours
