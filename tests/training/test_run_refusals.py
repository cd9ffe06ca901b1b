"""Runs that cannot be, and fields that do not go together: the error comes before anything is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe
from small import small_config

from grpo_jax import GRPO, PPO, Config, Hyperparams, run, with_reference
from grpo_jax.algorithms import GRPO_RETURN_TO_GO, REMAX
from grpo_jax.errors import ConfigError
from grpo_jax.groups import ANCHORED, forked
from grpo_jax.training.budget import check_budget

KEYS = jax.random.split(jax.random.key(0), 3)
SMALL = small_config("ppo", Probe(), num_steps=8)
WHOLE = small_config("grpo", group_size=4, env_params={"max_steps_in_episode": 32})
CUT = dataclasses.replace(WHOLE, num_steps=8, cut_episodes=True)


def of_run(config=WHOLE, keys=KEYS, chunk_length=None, **fields):
    return lambda: run(config, Hyperparams(**fields), keys, chunk_length=chunk_length)


def of_budget(**fields):
    return lambda: check_budget(SMALL, Hyperparams(**fields))


def of_fields(algorithm, **fields):
    return lambda: Config(algorithm=algorithm, **{"num_envs": 128} | fields)


REFUSED = [
    (of_run(keys=KEYS[:0]), "keys is empty, and one row is trained for each"),
    (of_run(chunk_length=0.5), "chunk_length=0.5 is not a positive integer"),
    (of_run(adam_eps=0.0), "adam_eps=0.0 must be more than 0; the default is"),
    (of_run(total_steps=jnp.array([4000.0, 100.0, 4000.0])), "does not allow one iteration of .* = 256.*raise total"),
    (of_run(total_steps=np.inf), "total_steps=inf, and there is no max_episodes, so nothing ends the run"),
    (of_run(CUT, total_steps=np.inf, max_episodes=100), "total_steps=inf, and episodes that are cut off need never"),
    (of_run(Config("Freeway-MinAtar", group_size=8), total_steps=5e4), "Freeway-MinAtar, 2500 .*s=16 or fewer.* ppo"),
    (of_budget(temperature=0.0), "temperature=0 is greedy"),
    (of_budget(total_steps=np.inf, max_episodes=10**12), "max_episodes=1e.12 may take more than 2.31 iterations"),
    (of_budget(max_episodes=np.array([8.0, 0.5])), "max_episodes=0.5 does not allow one iteration"),
    (of_budget(num_iterations=np.array([1, 2.5])), "num_iterations=2.5 is not a positive integer"),
    (of_budget(num_iterations=np.inf), "num_iterations=inf must be finite"),
    (of_budget(num_iterations=30, total_steps=1000.0), "total_steps=1000 and num_iterations=30 are two budgets; leave"),
    (of_budget(total_steps=np.inf, warmup=0.1), "warmup is a fraction of training, but total_steps"),
    (of_fields("grpo", regroup_every=100), "anchored groups"),
    (of_fields(GRPO_RETURN_TO_GO._replace(start=ANCHORED), num_steps=100, regroup_every=32), "num_steps=96"),
    (of_fields("grpo", num_kept_groups=9), "at most 8"),
    (of_fields("ppo", num_kept_groups=4), "2 members or more"),
    (of_fields(PPO._replace(live_groups_only=True)), "live_groups_only is for groups"),
    (of_fields(REMAX._replace(start=ANCHORED)), "whole episodes"),
    (of_fields(GRPO._replace(start=forked(2)), environment="tokens:sort-3"), "rewards whole episodes"),
    (lambda: PPO._replace(advantages=None), "unknown argument 'advantages' of Algorithm: did you mean 'advantage'"),
    (lambda: PPO._replace(penalties=len), r"penalties=.*len must be a tuple of functions: penalties=\(f,\)"),
    (lambda: GRPO._replace(start="fresh"), "start='fresh' must be FRESH, ANCHORED, CONTINUE or forked"),
    (lambda: GRPO._replace(reduce=None), r"reduce=None must be a function, called as f\(mask\) -> weights"),
    (lambda: GRPO._replace(greedy_member="yes"), "greedy_member='yes' must be True or False"),
    (lambda: with_reference("gprp"), "unknown algorithm 'gprp': did you mean 'grpo'"),
    (lambda: type("Mine", (Hyperparams,), {"softness": 0.5}), "Mine.softness has no type, .* softness: float = 0.5"),
    (lambda: forked(2.5), "the same state is forked"),
]


def test_what_cannot_be_is_refused():
    for refused, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            refused()


def test_budgets_of_all_kinds_are_accepted():
    of_budget(total_steps=np.inf, max_episodes=10**9, warmup=0.1)()
    of_budget(num_iterations=2**31 - 2, warmup=0.1)()
    of_budget(num_iterations=3, total_steps=np.inf)()
