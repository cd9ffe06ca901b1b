"""Settings found to work, and what counts as solved."""

CONFIGS = {
    "grpo": {"num_envs": 128, "num_minibatches": 16},
    "ppo": {"num_envs": 32, "num_minibatches": 16},
}
"""Fields of `Config`, by algorithm."""

HYPERPARAMS = {
    "grpo": {},
    "ppo": {"entropy_coef": 0.01},
    "dapo": {"clip_high": 0.28},
}
"""Fields of `Hyperparams`, by algorithm."""

SOLVED_AT = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "MountainCar-v0": -110.0, "Catch-bsuite": 0.95}
"""The mean return at which an environment counts as solved."""

ENV_PARAMS = {"Catch-bsuite": {"max_steps_in_episode": 9}}
"""Time limits where gymnax's own is far beyond the longest possible episode: rollouts of one-episode groups are as long
as the limit."""
