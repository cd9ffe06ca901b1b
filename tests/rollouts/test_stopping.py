"""Rollouts that stop when every episode has ended, and those in stages: the same results in fewer operations."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from probes import FOREVER, Probe, bits, copy_task, known_params, known_policy, standing

from grpo_jax import GRPO, PPO, Config
from grpo_jax.devices.execution_plan import CPU, GPU
from grpo_jax.environments import group_parameters, make_environment
from grpo_jax.groups import FRESH
from grpo_jax.policies import Transformer
from grpo_jax.rollouts import scan
from grpo_jax.rollouts.rollout import Simulator

NUM_STEPS = 12
env = make_environment(Probe(), {"max_steps_in_episode": NUM_STEPS - 3})


@functools.lru_cache
def player(plan, steps_per_check=0, auto_reset=False):
    """The function from lifetimes `[R, 3]` to rollouts of that many rows."""

    @jax.jit
    @jax.vmap
    def play(lifetimes):
        start = standing(env, known_policy, jax.random.key(0), ages=[0, 0, 0], lifetimes=lifetimes)
        layout = dataclasses.replace(plan, steps_per_check=steps_per_check)
        simulator = Simulator(env, known_policy, known_params((0.0, 0.0)), plan=layout)
        return simulator.unroll(start, jax.random.key(1), num_steps=NUM_STEPS, auto_reset=auto_reset)

    return play


def seen(end, trajectory):
    """What may be read: the end, valid steps, and the value of an episode's final observation."""
    valid = np.asarray(trajectory.valid)
    reached = np.concatenate([valid[:, :1], valid[:, :-1]], axis=1)
    steps = trajectory._replace(carry=None, value=None)
    return (
        end._replace(policy_carry=None),
        jax.tree.map(lambda leaf: np.asarray(leaf)[valid], steps),
        np.asarray(trajectory.value)[reached],
        trajectory.carry,
    )


@pytest.mark.parametrize("plan, steps_per_check, max_block", [(CPU, 2, 4), (GPU, 5, 128)])
def test_a_rollout_stops_after_the_step_that_follows_its_longest_episode(plan, steps_per_check, max_block, monkeypatch):
    monkeypatch.setattr(scan, "MAX_BLOCK", max_block)
    player.cache_clear()
    step = min(steps_per_check, 4)  # a divisor of the number of steps
    # Rows stop together.
    for needed, *rows in ((6, [2, 2, 2], [2, 5, 1]), (10, [FOREVER, 2, 2], [1, 1, 1]), (2, [1, 1, 1], [1, 1, 1])):
        lifetimes = np.array(rows)
        whole, early = (jax.device_get(player(plan, check)(lifetimes)) for check in (0, steps_per_check))
        assert bits(seen(*whole)) == bits(seen(*early))
        made = -(-needed // step) * step
        assert (early[0].policy_carry == made).all()  # this policy counts its steps
        assert not early[1].valid[:, made:].any() and not early[1].reward[:, made:].any()


def test_where_episodes_follow_each_other_nothing_stops():
    lifetimes = np.array([[2, 2, 2]])
    assert bits(player(CPU, 0, True)(lifetimes)) == bits(player(CPU, 1, True)(lifetimes))


@pytest.mark.parametrize(
    "plan, algorithm",
    [(dataclasses.replace(CPU, steps_per_check=1), GRPO), pytest.param(GPU, PPO, marks=pytest.mark.slow)],
    ids=["cpu", "gpu, with a critic"],
)
def test_attention_to_the_part_of_the_cache_that_can_be_filled_changes_nothing(plan, algorithm, monkeypatch):
    monkeypatch.setattr(scan, "MAX_BLOCK", 2)  # short completions are one block, and have one stage
    small = Transformer(width=8, num_heads=2, num_layers=1)
    algorithm = algorithm._replace(start=FRESH)
    config = Config(copy_task(), algorithm, num_envs=4, group_size=2, num_minibatches=2, network=small)
    init = jax.jit(lambda key: jax.tree.map(lambda leaf: leaf + 0.1, config.policy.init(key)))  # no value is 0
    params, lengths = init(jax.random.key(0)), []

    def step(params, observation, carry):
        lengths.append(carry.cache["actor"][0].keys.shape[2] - carry.prompt.shape[1])
        return config.policy.step(params, observation, carry)

    simulator = Simulator(config.env, config.policy._replace(step=step), params, plan=plan)
    start = jax.jit(lambda key: simulator.reset(group_parameters(config.env, None, 2, 2), key, 4, group_size=2))(
        jax.random.key(1)
    )
    unroll = functools.partial(simulator.unroll, num_steps=config.env.max_steps, auto_reset=False)
    whole, staged = (
        jax.jit(functools.partial(unroll, from_reset=from_reset))(start, jax.random.key(2))
        for from_reset in (False, True)
    )
    assert min(lengths) < max(lengths) == config.policy.max_steps
    valid = np.asarray(whole[1].valid)
    assert bits(valid) == bits(staged[1].valid) and bits(whole[1].action) == bits(staged[1].action)
    assert whole[1].truncated.any(), "the critic values a final observation"
    for name in ("log_prob", "value", "next_value")[: 3 if config.policy.has_critic else 1]:
        one, other = (np.asarray(getattr(trajectory, name))[valid] for _, trajectory in (whole, staged))
        np.testing.assert_allclose(one, other, atol=1e-5)
