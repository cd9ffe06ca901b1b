"""Settings found to work, by algorithm, suite and environment: fields of `Config`, its network and `Hyperparams`.

Those of suites start from the hyperparameters that each publishes, which are for thousands of environments on a GPU;
the numbers of environments and steps here suit two cores of a CPU.
"""

from typing import Any

from grpo_jax.algorithms import ALGORITHMS, Algorithm, by_name, name_of
from grpo_jax.groups import ANCHORED

IN_ANCHORED_GROUPS = [name for name, algorithm in ALGORITHMS.items() if algorithm.start is ANCHORED]
IN_GROUPS = {name: {"group_size": 8} for name in IN_ANCHORED_GROUPS}

ALGORITHM_SETTINGS = {
    "grpo": {"num_envs": 128, "num_minibatches": 16},  # also for the others with one-episode groups
    "ppo": {"num_envs": 32, "num_minibatches": 16, "entropy_coef": 0.01},
    "dapo": {"clip_high": 0.28},
    "ipo": {"clip_low": 0.3},  # prime-rl's
    "tpo": {"num_minibatches": 4},  # of whole groups, of which there are 8
    **IN_GROUPS,
}

BOX = {"normalize_observations": True, "discount": 0.95}
BOX_GRPO = {"num_envs": 32, "group_size": 8}
BOX_PPO = {"normalize_rewards": True, "num_envs": 16, "num_epochs": 10, "learning_rate": 1e-3, "entropy_coef": 0.0}
MINATAR = {"network": "mlp", "activation": "relu", "num_envs": 64, "learning_rate": 5e-3}
MINATAR_PPO = {"num_minibatches": 8, "entropy_coef": 0.01, "value_clip": 0.2, "gae_lambda": 0.8}
MINATAR_ANCHORED = {"group_size": 32, "learning_rate": 2.5e-3, "gae_lambda": 0.95}
MINATAR_GRPO = {"num_envs": 32, "learning_rate": 2.5e-3}
MINATAR_GAME = {"any": MINATAR, "ppo": MINATAR_PPO, "grpo": MINATAR_GRPO}
MINATAR_GAME |= dict.fromkeys(IN_ANCHORED_GROUPS, MINATAR_ANCHORED)
BANDIT = {"recurrent": "gru", "num_minibatches": 4, "learning_rate": 1e-3}  # it has to remember which arm pays

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
SHORT_STEPS = {"any": {"discount": 0.99}}  # of 0.008 to 0.015 seconds; the other robots' are of 0.02 to 0.05 seconds
# Navix publishes 16 environments, 128 steps, one epoch of 8 minibatches, a rate of 2.5e-4, 1 million steps.
GRID = {
    "any": GAME | {"total_steps": 250_000, "learning_rate": 5e-4, "network": "mlp"},
    "ppo": {"num_envs": 16, "num_steps": 128},
}

ENVIRONMENT_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "tokens:": {
        "any": {"num_envs": 512, "group_size": 8, "num_epochs": 1, "num_minibatches": 4, "learning_rate": 4e-4}
        | {"kl_coef": 0.001, "discount": 1.0, "gae_lambda": 1.0},
        "ppo": {"group_size": 1, "entropy_coef": 0.0},
        "gspo": {"clip_low": 3e-2, "clip_high": 4e-2},
        **IN_GROUPS,
    },
    "brax:": BRAX,
    **dict.fromkeys(("brax:hopper", "brax:walker2d", "brax:humanoid"), SHORT_STEPS),
    # MuJoCo Playground publishes a discount of 0.995, rewards times 10, 2048 environments, 60 million steps.
    "playground:": BRAX | {"any": BRAX["any"] | {"discount": 0.995}},
    # Craftax publishes 1024 environments, a rate of 2e-4, 3 layers of 512, 1 billion steps.
    "craftax:": {
        "any": GAME | {"learning_rate": 1e-3, "gae_lambda": 0.8, "hidden_sizes": (256, 256)},
        "ppo": {"num_steps": 64, "starts_per_rollout": 1},
    },
    # Jumanji publishes A2C with a convolution of 32 channels, 96 to 256 million steps.
    "jumanji:": {"any": BOARD, "ppo": {"num_steps": 64}},
    "pgx:": {"any": BOARD | {"network": "mlp"}, "ppo": {"num_steps": 64}},
    "navix:": GRID,
    "xland:": GRID,
    # A reward only at the end of two errands. rejax publishes 128 environments, 32 steps, a rate of 3e-4, 2 epochs.
    "navix:Navix-DoorKey-8x8-v0": {
        "any": {"total_steps": 1_000_000, "num_epochs": 4, "num_minibatches": 32, "max_grad_norm": 10.0}
        | {"learning_rate": 1e-3, "discount": 0.95, "gae_lambda": 0.9}
        | {"activation": "swish", "normalize_observations": True},
        "ppo": {"num_envs": 128, "num_steps": 32},
    },
    "Pendulum-v1": {"any": BOX, "ppo": BOX_PPO, "grpo": BOX_GRPO},
    "Reacher-misc": {"any": BOX, "ppo": BOX_PPO, "grpo": BOX_GRPO},
    "Swimmer-misc": {"any": BOX | {"discount": 0.99}, "ppo": BOX_PPO, "grpo": BOX_GRPO | {"num_envs": 16}},
    # The robot has to find its goal and remember it.
    "PointRobot-misc": {"any": BANDIT, "ppo": {"num_epochs": 8, "entropy_coef": 0.0}, "grpo": BOX_GRPO},
    "MountainCarContinuous-v0": {
        "any": {"normalize_observations": True},
        "ppo": BOX_PPO | {"discount": 0.999, "num_envs": 32},
        "grpo": {"num_envs": 16, "group_size": 8},
    },
    "MountainCar-v0": {
        "any": {"normalize_observations": True},
        "ppo": BOX_PPO | {"num_epochs": 4, "num_steps": 16, "num_minibatches": 4, "gae_lambda": 0.98},
    },
    # Their time limits, and so the rollouts of one-episode groups, are far longer than the longest possible episode.
    "Catch-bsuite": {"any": {"network": "mlp", "env_params": {"max_steps_in_episode": 9}}},
    "MemoryChain-bsuite": {
        "any": {"recurrent": "gru", "num_minibatches": 4}
        | {"env_params": {"memory_length": 10, "max_steps_in_episode": 12}}
    },
    "DeepSea-bsuite": {
        "any": {"network": "mlp", "entropy_coef": 0.01, "env_params": {"max_steps_in_episode": 8}},
        "grpo": {"entropy_coef": 0.02},
    },
    # The first action decides the reward at the end, which discounting would hide.
    "UmbrellaChain-bsuite": {"any": {"discount": 1.0, "env_params": {"max_steps_in_episode": 10}}},
    "DiscountingChain-bsuite": {"any": {"discount": 1.0}, "ppo": {"gae_lambda": 1.0}, "grpo": {"num_envs": 32}},
    "SimpleBandit-bsuite": {"any": {"network": "mlp", "env_params": {"max_steps_in_episode": 1}}},
    "BernoulliBandit-misc": {"any": BANDIT, "grpo": {"num_envs": 64}},
    "GaussianBandit-misc": {
        "any": BANDIT,
        "ppo": {"normalize_rewards": True, "learning_rate": 2e-3},
        "grpo": {"num_envs": 64},
    },
    # Its observation contains the time step, up to 200.
    "MetaMaze-misc": {
        "any": BANDIT | {"normalize_observations": True, "discount": 0.95, "learning_rate": 2e-3},
        "ppo": {"normalize_rewards": True, "num_envs": 16},
        "grpo": BOX_GRPO,
    },
    "FourRooms-misc": {"any": {"normalize_observations": True, "entropy_coef": 0.01}},
    **{f"{game}-MinAtar": MINATAR_GAME for game in ("Asterix", "Seaquest", "SpaceInvaders")},
    # It learns less with a shorter trace, unlike the others.
    "Breakout-MinAtar": MINATAR_GAME | {"ppo": MINATAR_PPO | {"gae_lambda": 0.95}},
    # Its episodes have 2,500 steps, so that there are fewer of them.
    "Freeway-MinAtar": MINATAR_GAME | {"grpo": MINATAR_GRPO | {"num_envs": 16}},
    "FrozenLake-misc": {"grpo": {"learning_rate": 1e-3, "entropy_coef": 0.02}},
    "Pong-misc": {"any": {"network": "mlp", "num_envs": 16, "activation": "relu", "learning_rate": 1e-3}},
}
"""By name, or by suite with its colon. "any" is for all algorithms, "ppo" for those whose environments continue across
rollouts, "grpo" for the others, and the name of an algorithm for that one."""


def tuned_settings(environment: Any, algorithm: str | Algorithm) -> dict[str, Any]:
    """The settings for an environment and an algorithm, by the names of the fields.

    The environment's override its suite's, and these the algorithm's. An environment without settings has those of the
    algorithm, a custom algorithm those of its kind: of PPO, of anchored groups or of GRPO.
    """
    algorithm = algorithm if isinstance(algorithm, Algorithm) else by_name(algorithm)
    name, start = name_of(algorithm), algorithm.start
    kind = "ppo" if start.auto_reset else "grpo"
    if name not in ALGORITHMS:
        name = "kernel_gae" if start.grouped and start.auto_reset else kind
    names = ("".join(environment.partition(":")[:2]), environment) if isinstance(environment, str) else ()
    fields = {}
    for table in (ALGORITHM_SETTINGS, *(ENVIRONMENT_SETTINGS.get(each, {}) for each in names)):
        fields |= table.get("any", {}) | table.get(kind, {}) | table.get(name, {})
    return fields
