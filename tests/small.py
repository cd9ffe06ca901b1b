"""Small configs: every test that needs one that trains gets it here."""

import functools

import jax

from grpo_jax import Config, Hyperparams
from grpo_jax.policies import MLP
from grpo_jax.training.train_step import initial_state
from grpo_jax.updates.minibatches import make_gradient, make_minibatch


def small_config(algorithm="ppo", environment="CartPole-v1", **fields):
    """One epoch of one minibatch with a network of four units, and eight environments, unless told otherwise."""
    sizes = {"num_envs": 8, "num_epochs": 1, "num_minibatches": 1, "network": MLP((4,))}
    return Config(environment=environment, algorithm=algorithm, **sizes | fields)


def begin(config, hyperparams=None, seed=0):
    """The state before training, for tests that do not train: without the trial on shapes of `make_init`."""
    init = jax.jit(functools.partial(initial_state, config))
    return init(jax.random.key(seed), hyperparams or Hyperparams())


def minibatch_gradient(config, policy, params, batch, indices, hyperparams):
    """Loss, metrics and gradient over the samples at these indices."""
    minibatch = make_minibatch(config, batch, hyperparams, indices.reshape(config.shuffle_blocks, -1))
    stacked, gradient = make_gradient(config, policy, batch, hyperparams)(params, minibatch)
    metrics = stacked.as_dict()
    return metrics.pop("loss"), metrics, gradient
