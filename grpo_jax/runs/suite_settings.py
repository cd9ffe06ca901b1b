"""Settings of suites of environments, beside those of `settings.py`: by suite, and for single environments.

They start from the hyperparameters that each suite publishes, which are for thousands of environments on a GPU. The
numbers of environments and steps here suit two cores of a CPU.
"""

from typing import Any

NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
GAME = {"total_steps": 1_000_000, "num_envs": 64, "num_minibatches": 8, "entropy_coef": 0.01}
BOARD = GAME | {"learning_rate": 5e-4, "normalize_rewards": True, "hidden_sizes": (128, 128)}

# brax publishes discounts of 0.95 to 0.97, rewards times 0.1 to 10, 2048 to 4096 environments, 50 million steps.
BRAX = {
    "any": {"total_steps": 300_000, "num_envs": 32, "num_epochs": 10, "num_minibatches": 32, "entropy_coef": 0.0}
    | {"learning_rate": 1e-3, "discount": 0.97}
    | NORMALIZED,
    "ppo": {"num_steps": 64, "starts_per_rollout": 1},
}

BY_SUITE: dict[str, dict[str, dict[str, Any]]] = {
    "brax": BRAX,
    # Craftax publishes 1024 environments, a rate of 2e-4, 3 layers of 512, 1 billion steps.
    "craftax": {
        "any": GAME | {"learning_rate": 1e-3, "gae_lambda": 0.8, "hidden_sizes": (256, 256)},
        "ppo": {"num_steps": 64, "starts_per_rollout": 1},
    },
    # Jumanji publishes A2C with a convolution of 32 channels, 96 to 256 million steps.
    "jumanji": {"any": BOARD, "ppo": {"num_steps": 64}},
    # Navix publishes 16 environments, 128 steps, one epoch of 8 minibatches, a rate of 2.5e-4, 1 million steps.
    "navix": {
        "any": {"total_steps": 250_000, "num_minibatches": 8, "learning_rate": 5e-4, "entropy_coef": 0.01}
        | {"network": "mlp"},
        "ppo": {"num_envs": 16, "num_steps": 128},
        "grpo": {"num_envs": 64},
    },
    "pgx": {"any": BOARD | {"network": "mlp"}, "ppo": {"num_steps": 64}},
    # MuJoCo Playground publishes a discount of 0.995, rewards times 10, 2048 environments, 60 million steps.
    "playground": BRAX | {"any": BRAX["any"] | {"discount": 0.995}},
}
"""By the name before the colon, each as a value of `ENVIRONMENT_SETTINGS`."""
BY_SUITE["xland"] = BY_SUITE["navix"]

# Their steps take 0.008 to 0.015 seconds, the others' 0.02 to 0.05 seconds.
SHORT_STEPS = {"any": {"discount": 0.99}}

BY_ENVIRONMENT: dict[str, dict[str, dict[str, Any]]] = {
    # A reward only at the end of two errands. rejax publishes 128 environments, 32 steps, a rate of 3e-4, 2 epochs.
    "navix:Navix-DoorKey-8x8-v0": {
        "any": {"total_steps": 1_000_000, "num_epochs": 4, "num_minibatches": 32, "max_grad_norm": 10.0}
        | {"learning_rate": 1e-3, "discount": 0.95, "gae_lambda": 0.9}
        | {"activation": "swish", "normalize_observations": True},
        "ppo": {"num_envs": 128, "num_steps": 32},
    },
    "brax:hopper": SHORT_STEPS,
    "brax:walker2d": SHORT_STEPS,
    "brax:humanoid": SHORT_STEPS,
}
"""Exceptions, by the whole name of the environment."""
