"""Settings of suites of environments, beside those of `settings.py`: by suite, and for single environments.

They start from the hyperparameters that each suite publishes, which are for thousands of environments on a GPU. The
numbers of environments and steps here suit two cores of a CPU.
"""

from typing import Any

# brax publishes discounts of 0.95 to 0.97, rewards times 0.1 to 10, 2048 to 4096 environments, 50 million steps.
BRAX = {
    "any": {
        "total_steps": 300_000,
        "num_envs": 32,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 1e-3,
        "discount": 0.97,
        "normalize_observations": True,
        "normalize_rewards": True,
        "entropy_coef": 0.0,
    },
    "ppo": {"num_steps": 64, "starts_per_rollout": 1},
}

# Craftax publishes 1024 environments, a rate of 2e-4, 3 layers of 512, 1 billion steps.
CRAFTAX = {
    "any": {
        "total_steps": 1_000_000,
        "num_envs": 64,
        "num_minibatches": 8,
        "learning_rate": 1e-3,
        "gae_lambda": 0.8,
        "entropy_coef": 0.01,
        "hidden_sizes": (256, 256),
    },
    "ppo": {"num_steps": 64, "starts_per_rollout": 1},
}

PGX = {
    "any": {
        "total_steps": 1_000_000,
        "num_envs": 64,
        "num_minibatches": 8,
        "learning_rate": 5e-4,
        "normalize_rewards": True,
        "entropy_coef": 0.01,
        "network": "mlp",
        "hidden_sizes": (128, 128),
    },
    "ppo": {"num_steps": 64},
    "lstd_gae": {"learning_rate": 2e-3},
}

# Navix publishes 16 environments, 128 steps, one epoch of 8 minibatches, a rate of 2.5e-4, 1 million steps.
NAVIX = {
    "any": {
        "total_steps": 250_000,
        "num_minibatches": 8,
        "learning_rate": 5e-4,
        "entropy_coef": 0.01,
        "network": "mlp",
    },
    "ppo": {"num_envs": 16, "num_steps": 128},
    "grpo": {"num_envs": 64},
}

# Jumanji publishes A2C with a convolution of 32 channels, 96 to 256 million steps.
JUMANJI = {
    "any": {
        "total_steps": 1_000_000,
        "num_envs": 64,
        "num_minibatches": 8,
        "learning_rate": 5e-4,
        "normalize_rewards": True,
        "entropy_coef": 0.01,
        "hidden_sizes": (128, 128),
    },
    "ppo": {"num_steps": 64},
}

# MuJoCo Playground publishes a discount of 0.995, rewards times 10, 2048 environments, 60 million steps.
PLAYGROUND = BRAX | {"any": BRAX["any"] | {"discount": 0.995}}

BY_SUITE: dict[str, dict[str, dict[str, Any]]] = {
    "brax": BRAX,
    "craftax": CRAFTAX,
    "jumanji": JUMANJI,
    "navix": NAVIX,
    "pgx": PGX,
    "playground": PLAYGROUND,
    "xland": NAVIX,
}
"""By the name before the colon, each as a value of `ENVIRONMENT_SETTINGS`."""

# Their steps are of 0.008 to 0.015 seconds; those of the others are of 0.02 to 0.05 seconds.
SHORT_STEPS = {"any": {"discount": 0.99}}

# A reward only at the end of two errands. rejax publishes 128 environments, 32 steps, a rate of 3e-4, 2 epochs.
DOOR_KEY = {
    "any": {
        "total_steps": 1_000_000,
        "num_epochs": 4,
        "num_minibatches": 32,
        "learning_rate": 1e-3,
        "discount": 0.95,
        "gae_lambda": 0.9,
        "activation": "swish",
        "normalize_observations": True,
        "max_grad_norm": 10.0,
    },
    "ppo": {"num_envs": 128, "num_steps": 32},
}

BY_ENVIRONMENT: dict[str, dict[str, dict[str, Any]]] = {
    "navix:Navix-DoorKey-8x8-v0": DOOR_KEY,
    "brax:hopper": SHORT_STEPS,
    "brax:walker2d": SHORT_STEPS,
    "brax:humanoid": SHORT_STEPS,
}
"""Exceptions, by the whole name of the environment."""
