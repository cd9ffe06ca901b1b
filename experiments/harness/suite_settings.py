"""Settings found to work for suites of environments, as those of `settings.py`: by suite, and for single environments.

They start from the hyperparameters that the suites publish for thousands of environments on a GPU, with as many
environments and steps as suit two cores of a CPU, `total_steps` among them.
"""

from typing import Any

# brax's own: discount 0.95 to 0.97, rate 3e-4, rewards times 1 to 10, 2048 to 4096 environments, 50 million steps.
BRAX = {
    "any": {
        "total_steps": 500_000,
        "num_envs": 32,
        "num_steps": 64,
        "starts_per_rollout": 1,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 3e-4,
        "entropy_coef": 0.0,
        "normalize_observations": True,
        "normalize_rewards": True,
    },
}

# Craftax's own: 1024 environments, rate 2e-4, 3 layers of 512, clipping at a norm of 1, 1 billion steps.
CRAFTAX = {
    "any": {
        "total_steps": 1_000_000,
        "num_envs": 64,
        "num_steps": 64,
        "starts_per_rollout": 1,
        "num_epochs": 4,
        "num_minibatches": 8,
        "learning_rate": 1e-3,
        "gae_lambda": 0.8,
        "entropy_coef": 0.01,
        "hidden_sizes": (256, 256),
    },
}

PGX = {
    "any": {
        "total_steps": 2_000_000,
        "num_envs": 64,
        "num_steps": 64,
        "num_epochs": 4,
        "num_minibatches": 8,
        "learning_rate": 1e-3,
        "normalize_rewards": True,
        "entropy_coef": 0.01,
        "network": "mlp",
        "hidden_sizes": (256, 256),
    },
}

SUITES: dict[str, dict[str, dict[str, Any]]] = {"brax": BRAX, "craftax": CRAFTAX, "pgx": PGX}
"""By the name before the colon, each as a value of `ENVIRONMENT_SETTINGS`."""

IN_SUITES: dict[str, dict[str, dict[str, Any]]] = {}
"""Exceptions, by the whole name of the environment."""
