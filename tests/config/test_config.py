"""What a `Config` resolves, and every mistake told before anything is compiled, with what to write instead."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from probes import Echo, Parts, Probe, check, copy_task

from grpo_jax import GRPO, PPO, Config
from grpo_jax.algorithms import GRPO_RETURN_TO_GO, REMAX, TPO, with_reference
from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.groups import CONTINUE, FRESH, forked
from grpo_jax.objectives import exact_kl_to_reference, frozen_reference, returns_to_go
from grpo_jax.policies import MLP, Transformer


def test_what_is_left_out_becomes_what_suits_the_algorithm():
    grpo, ppo = Config(), Config(algorithm="PPO")
    assert Config(algorithm="grpo-return-to-go").algorithm == GRPO_RETURN_TO_GO
    assert (grpo.algorithm, grpo.num_envs, grpo.group_size, grpo.num_groups) == (GRPO, 32, 16, 2)
    assert (grpo.num_steps, grpo.steps_per_iteration) == (500, 16_000)
    assert (ppo.algorithm, ppo.group_size, ppo.num_steps, ppo.steps_per_iteration) == (PPO, 1, 128, 4_096)
    assert not grpo.policy.has_critic and ppo.policy.has_critic
    assert Config(num_envs=8, num_minibatches=1).group_size == 8
    assert Config(environment="Acrobot-v1", env_params={"max_steps_in_episode": 100}).num_steps == 100


def test_a_prompt_asks_for_a_transformer_and_auto_for_groups():
    tokens = {"environment": copy_task(), "num_envs": 8, "group_size": 4, "network": Transformer(num_layers=1)}
    config = Config(**tokens, num_minibatches=2)
    assert Config(**tokens, num_minibatches=2, algorithm="auto") == config and Config(algorithm="auto").algorithm == PPO
    assert config.is_transformer and config.share_prompts and config.policy.max_steps == 4
    # Two groups cannot be dealt out over four minibatches, but eight completions can.
    assert not Config(**tokens, num_minibatches=4).share_prompts
    alone = tokens | {"group_size": 1, "num_minibatches": 2}
    assert not Config(**alone, algorithm=PPO._replace(start=FRESH)).share_prompts
    assert not Config().is_transformer


def test_configs_are_values():
    config = Config(env_params={"gravity": 9.0, "length": 0.4}, network=MLP([32]))
    same = Config(env_params=(("length", 0.4), ("gravity", 9.0)), network=MLP((32,)), algorithm=GRPO, group_size=16)
    assert config == same and hash(config) == hash(same) and len({config, same}) == 1
    assert config != Config(env_params={"gravity": 9.0}, network=MLP((32,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_envs = 4
    for kept in (config, Config("tokens:sort-3", algorithm="gdpo"), Config(algorithm=PPO._replace(start=forked(3)))):
        assert kept.policy  # what was made of the fields is not pickled
        again = pickle.loads(pickle.dumps(kept))
        assert again == kept == copy.deepcopy(kept) and hash(again) == hash(kept)
    probe = Probe()
    assert Config(environment=probe) == Config(environment=probe)


def test_counts_of_numpy_are_those_of_python():
    sizes = {"num_envs": 8, "group_size": 4, "num_steps": 16, "num_epochs": 2, "num_minibatches": 2}
    fields = {"algorithm": "grpo", "cut_episodes": True, "env_params": {"max_steps_in_episode": 20}}
    config = Config(**sizes, **fields, network=MLP((8, 4)))
    numpy = {name: np.int64(size) for name, size in sizes.items()}
    for widths in ((np.int32(8), np.int64(4)), np.array([8, 4])):
        same = Config(**numpy, **fields | {"env_params": {"max_steps_in_episode": np.int64(20)}}, network=MLP(widths))
        assert same == config and hash(same) == hash(config) and repr(same) == repr(config)
        assert all(type(getattr(same, name)) is int for name in sizes)
    assert forked(np.int64(3)) == forked(3) and type(forked(np.int64(3)).trunk_steps) is int


def test_replace_checks_again_and_makes_the_environment_anew():
    config = Config()
    assert config.env.max_steps == 500
    shorter = dataclasses.replace(config, env_params={"max_steps_in_episode": 100}, num_steps=100)
    assert (shorter.env.max_steps, shorter.num_steps, shorter.num_envs) == (100, 100, config.num_envs)
    assert dataclasses.replace(config) == config
    with pytest.raises(ValueError, match="num_minibatches=0 is not a positive integer"):
        dataclasses.replace(config, num_minibatches=0)


def of_parts(keys, algorithm="ppo"):
    return {"environment": Parts(), "algorithm": algorithm, "network": MLP(actor_observation=keys)}


TWO_GROUPS = {"algorithm": "tpo", "num_minibatches": 1}
MISTAKES = {
    "not an environment": ({"environment": 3}, "environment=3 .*name.*'CartPole-v1'"),
    "unknown algorithm": ({"algorithm": "gpro"}, "unknown algorithm 'gpro': did you mean .*'grpo'"),
    "a name for extras": ({"extras": "discount"}, "extras='discount' must be a tuple of names"),
    "numbers for extras": ({"extras": (1,)}, "must be a tuple of names"),
    "no environments": ({"num_envs": 0}, "num_envs=0 .*positive integer"),
    "a float of steps": ({"num_steps": 500.0}, r"num_steps=500.0 .*positive integer"),
    "incomplete group": ({"num_envs": 100, "group_size": 16}, "not a multiple of group_size=16.*num_envs=96 or 112"),
    "too many to shuffle": ({"algorithm": "ppo", "num_envs": 2**20, "num_steps": 65}, r"steps = 68157440 .*\(2\^26\)"),
    "uneven minibatches": ({"num_minibatches": 30}, "num_envs . num_steps = 16000 .*=30,.* use num_minibatches=32"),
    "uneven sequences": ({"algorithm": "gspo", "num_minibatches": 100}, "sequences.* = 32 .*use num_minibatches=32"),
    "members cut": ({"num_steps": 200}, "episode limit of CartPole-v1, 500.*num_steps=500, or cut_episodes=True"),
    "group of one": ({"group_size": 1}, "group_size is 1.*Use group_size >= 2"),
    "real actions": ({"action_distribution": "gaussian"}, "unknown action_distribution 'gaussian': use 'auto'"),
    "rollouts of tokens that go on": ({"environment": copy_task(), "algorithm": "ppo"}, r"_replace\(start=FRESH\)"),
    "a transformer of real observations": ({"network": "transformer"}, "observes a token .*float32.*network='mlp'"),
    "a field of the network": ({"hidden_sizes": (4,)}, r"of the network: Config\(network=MLP\(hidden_sizes=\(4,\)\)\)"),
    "uneven groups": ({"environment": copy_task(), "share_prompts": True}, "whole groups, .* = 2 .*num_minibatches=2"),
    "exact divergences in chunks": (
        {"environment": copy_task(), "logits_chunk": 8, "num_minibatches": 1}
        | {"algorithm": with_reference(GRPO, kl=exact_kl_to_reference)},
        "logits_chunk=8 keeps no distributions.*use kl_to_reference",
    ),
    "windows without overlong episodes": ({"algorithm": PPO._replace(filter_overlong=True)}, r"\(start=FRESH\)"),
    "an unknown part": (of_parts(("positions",)), r"must be a tuple of keys .* which has \('position',"),
    "a key in place of keys": (of_parts("position"), r"actor_observation='position' must be a tuple of keys"),
    "no critic that sees more": (of_parts(("position",), "grpo"), "needs a critic that sees all; leave it out"),
    "split groups": (
        {"algorithm": "tpo"},
        "whole groups, which group_surrogate compares.* = 2 .*use num_minibatches=2",
    ),
    "blocks of groups": (TWO_GROUPS | {"shuffle_blocks": 4}, "shuffle_blocks=4 does not divide the 2 groups"),
    "a group without others": (
        {"algorithm": TPO._replace(advantage=returns_to_go), "group_size": 1},
        "group_surrogate compares members of groups, but group_size=1 .*use group_size=2",
    ),
    "no groups": ({"algorithm": TPO._replace(start=CONTINUE)}, "group_surrogate is for groups that start from one"),
    "not one number for a group": (
        TWO_GROUPS | {"algorithm": TPO._replace(group_surrogate=lambda *arguments: arguments[0])},
        r"the slot 'group_surrogate' returned shape \(1, 16\), but should return",
    ),
    "parts of a minibatch that a slot compares": (
        {"algorithm": "high_entropy", "num_microbatches": 2},
        "num_microbatches=2",
    ),
    "a slot with a Python if": (
        {"algorithm": GRPO._replace(reduce=lambda mask: mask / 2 if mask.any() else mask)},
        "array with shape bool.*; it is traced: write jnp.where.*lambda> fills the slot reduce",
    ),
    "nobody beside the greedy member": ({"algorithm": REMAX, "group_size": 1}, "group_size=1 .*use group_size=2"),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_before_anything_is_compiled(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(**arguments))


def test_a_config_alone_traces_nothing():
    def fails(*arguments):
        raise RuntimeError("traced")

    environment = make_environment(Probe())._replace(reset=fails, step=fails)
    slots = dict.fromkeys(("advantage", "ratio", "surrogate", "reduce"), fails)
    config = Config(environment=environment, algorithm=GRPO._replace(**slots), num_envs=8, num_minibatches=1)
    with pytest.raises(ConfigError, match="the algorithm and this configuration do not fit: traced"):
        check(config)


FITTING = {
    "reference": {"algorithm": with_reference(GRPO, frozen_reference)},
    "ppo with a reference": {"algorithm": with_reference(PPO, frozen_reference, exact_kl_to_reference)},
    "groups that continue": {"algorithm": GRPO._replace(start=CONTINUE), "group_size": 16},
    "object": {"environment": Echo(), "num_minibatches": 1},
    "linear": {"network": MLP(hidden_sizes=(), activation="gelu")},
    "longer than an episode": {"num_steps": 512},
    "2^26 samples": {"algorithm": "ppo", "num_envs": 2**20, "num_steps": 64},
}


@pytest.mark.parametrize("arguments", FITTING.values(), ids=FITTING)
def test_what_fits_together_is_accepted(arguments):
    check(Config(**arguments))
