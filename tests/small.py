"""Small configs: every test that needs one that trains gets it here."""

from grpo_jax import Config
from grpo_jax.policies import MLP


def small_config(algorithm="ppo", environment="CartPole-v1", **fields):
    """One epoch of one minibatch with a network of four units, and eight environments, unless told otherwise."""
    sizes = {"num_envs": 8, "num_epochs": 1, "num_minibatches": 1, "network": MLP((4,))}
    return Config(environment=environment, algorithm=algorithm, **sizes | fields)
