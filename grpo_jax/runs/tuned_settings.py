"""Settings found to work, by algorithm and by environment.

Each is a field of `Config`, of its network or of `Hyperparams`.
"""

from typing import Any

from grpo_jax.algorithms import ALGORITHMS, Algorithm, by_name, name_of
from grpo_jax.groups import ANCHORED
from grpo_jax.runs.suite_settings import BY_ENVIRONMENT, BY_SUITE

IN_ANCHORED_GROUPS = [name for name, algorithm in ALGORITHMS.items() if algorithm.start is ANCHORED]
IN_GROUPS = {name: {"group_size": 8} for name in IN_ANCHORED_GROUPS}

ALGORITHM_SETTINGS = {
    "grpo": {"num_envs": 128, "num_minibatches": 16},  # also for the others with one-episode groups
    "ppo": {"num_envs": 32, "num_minibatches": 16, "entropy_coef": 0.01},
    "dapo": {"clip_high": 0.28},
    "dppo_tv": {"clip_low": 0.15, "clip_high": 0.15},
    "dppo_kl": {"clip_low": 0.05, "clip_high": 0.05},  # the paper's
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

TOKEN_SETTINGS = {
    "any": {"num_envs": 512, "group_size": 8, "num_epochs": 1, "num_minibatches": 4, "learning_rate": 4e-4}
    | {"kl_coef": 0.001, "discount": 1.0, "gae_lambda": 1.0},
    "ppo": {"group_size": 1, "entropy_coef": 0.0},
    "gspo": {"clip_low": 3e-2, "clip_high": 4e-2},
    # A completion costs the tokens of its branches too, so iterations are smaller.
    "vine_ppo": {"num_envs": 64, "group_size": 1, "gae_lambda": 0.0, "learning_rate": 2e-4},
    **IN_GROUPS,
}

SUITE_SETTINGS = BY_SUITE | {"tokens": TOKEN_SETTINGS}
"""By the name before the colon."""

ENVIRONMENT_SETTINGS = BY_ENVIRONMENT | {
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
        "grpo": {"num_envs": 32, "group_size": 8},
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
""" "any" is for all algorithms, "ppo" for those whose environments continue across rollouts, "grpo" for the others, and
the name of an algorithm for that one."""


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
    tables = [ALGORITHM_SETTINGS]
    if isinstance(environment, str):
        suite = environment.partition(":")[0]
        tables += [SUITE_SETTINGS.get(suite, {}), ENVIRONMENT_SETTINGS.get(environment, {})]
    fields = {}
    for table in tables:
        fields |= table.get("any", {}) | table.get(kind, {}) | table.get(name, {})
    return fields
