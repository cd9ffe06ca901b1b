"""Small configs: every test that needs one that trains gets it here."""

from grpo_jax import Config


def small_config(algorithm="ppo", environment="CartPole-v1", *, hidden_sizes=(4,), **fields):
    """One epoch of one minibatch with a network of four units, and eight environments, unless told otherwise."""
    if "transformer" not in fields:
        fields["hidden_sizes"] = hidden_sizes
    sizes = {"num_envs": 8, "num_epochs": 1, "num_minibatches": 1}
    return Config(environment=environment, algorithm=algorithm, **sizes | fields)
