"""Updates leave out the steps after the longest episode, which changes nothing but their cost."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from probes import Probe, copy_task
from small import begin

from grpo_jax import Config, Hyperparams, make_learn, make_play, with_reference
from grpo_jax.algorithms import DAPO, DR_GRPO, GRPO_PROCESS, GSPO, PPO
from grpo_jax.groups import FRESH
from grpo_jax.objectives import kl_penalized_reward
from grpo_jax.policies import MLP, Transformer
from grpo_jax.training.host_side import steps_to_learn
from grpo_jax.training.train_step import Played
from grpo_jax.updates.lengths import rounded_length

HYPERPARAMS = Hyperparams(learning_rate=0.05, kl_coef=0.1, entropy_coef=0.01, num_iterations=1.0)
TINY = Transformer(width=8, num_heads=2, num_layers=1)
ADAPTERS = {"network": dataclasses.replace(TINY, lora_rank=2), "logits_chunk": 32}
LIVES = {"environment": Probe(), "env_params": {"max_steps_in_episode": 100, "lifetime": 30, "bonus": 1.0}}
CASES = {
    "dr_grpo": (DR_GRPO, LIVES | {"network": MLP((4,)), "num_epochs": 1, "num_minibatches": 1}),
    "dr_grpo, reference, adapters, logits in chunks": (with_reference(DR_GRPO), ADAPTERS),
    "dapo, kept groups, overlong left out": (DAPO._replace(filter_overlong=True), {"num_kept_groups": 2}),
    "gspo, reference in the reward": (with_reference(GSPO)._replace(reward=kl_penalized_reward, penalties=()), {}),
    "ppo, microbatches": (PPO._replace(start=FRESH), {"num_microbatches": 2}),
    "rewards of steps": (GRPO_PROCESS, {}),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dr_grpo")) for name in CASES])
def test_an_update_without_the_steps_after_the_longest_episode_is_the_same(name):
    algorithm, fields = CASES[name]
    sizes = {"num_envs": 16, "group_size": 4, "num_epochs": 2, "num_minibatches": 2, "network": TINY}
    common = sizes | {"environment": copy_task(max_steps=100), "optimizer": "sgd"}
    config = Config(algorithm=algorithm, **common | fields)
    state = begin(config, HYPERPARAMS)
    if state.reference_params is not None:
        state = state.replace(reference_params=jax.tree.map(lambda leaf: leaf + 0.1, state.reference_params))
    played = jax.jit(make_play(config))(state)
    trajectory = played.trajectory
    reward = trajectory.reward + trajectory.valid * trajectory.action  # of every step
    played = played._replace(trajectory=trajectory._replace(reward=reward))
    longest = int(np.sum(trajectory.valid, axis=0).max())
    assert 10 < longest < 100
    whole, cut = (jax.device_get(jax.jit(make_learn(config, length))(state, played)) for length in (None, longest))
    changed = jax.tree.map(lambda new, old: np.abs(new - old).max(), whole[0].params, jax.device_get(state.params))
    assert max(jax.tree.leaves(changed)) > 1e-3
    for one, other in ((whole[0].params, cut[0].params), (whole[1], cut[1])):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6), one, other)


def test_few_lengths_are_compiled():
    lengths = {longest: rounded_length(longest, 250) for longest in range(1, 251)}
    assert all(longest <= length <= max(1.5 * longest, 16) for longest, length in lengths.items())
    assert [*dict.fromkeys(lengths.values())] == [16, 24, 32, 48, 64, 96, 128, 192, 250]
    assert rounded_length(3, 4) == rounded_length(4, 4) == 4
    valid = np.zeros((2, 100, 3), bool)  # two rows of three episodes
    for expected, steps in ((16, 0), (24, 17), (100, 97)):
        valid[1, :steps, 2] = True
        assert steps_to_learn(Played(None, types.SimpleNamespace(valid=valid), None)) == expected
