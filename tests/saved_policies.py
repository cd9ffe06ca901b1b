"""Folders with policies that were never trained, so that nothing but their first state is traced and compiled."""

import functools
import json

import jax
import numpy as np

from grpo_jax import Hyperparams
from grpo_jax.environments import row_parameters
from grpo_jax.recording.policy_saver import PolicySaver
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.training.train_step import initial_state


def save_policies(directory, config, *, scores=(1.0, 2.0), label="run", env_params=None, hyperparams=None):
    """Writes a row for each score, with the statistics of some observations; returns the train states."""
    keys = jax.random.split(jax.random.key(1), len(scores))
    hyperparams = hyperparams or Hyperparams(learning_rate=np.arange(1.0, 1.0 + len(scores), dtype=np.float32))
    plan = RunSpec(label, config, hyperparams, keys, env_params=env_params)

    @jax.jit
    def begin(hyperparams, keys, env_params):
        rows = hyperparams.broadcast(len(keys)), row_parameters(config.env, env_params, len(keys))
        states = jax.vmap(functools.partial(initial_state, config))(keys, *rows)
        # Heads begin so small that all actions would be equal.
        params = jax.tree.map(lambda leaf: 10 * leaf + 0.1, states.params)
        return states.replace(params=params, normalizer=jax.tree.map(lambda leaf: leaf + 0.5, states.normalizer))

    states = begin(hyperparams, keys, env_params)
    PolicySaver(directory, plan).save(states, np.arange(len(scores)), np.array(scores))
    return states


def edited(path, change):
    """Rewrites the fields of an .npz of a run by a function of them."""
    arrays = dict(np.load(path))
    fields = change(json.loads(str(arrays.pop("fields"))))
    np.savez(path, fields=json.dumps(fields), **arrays)


def contents(directory):
    """The bytes of each file of a folder, but for its lock."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
