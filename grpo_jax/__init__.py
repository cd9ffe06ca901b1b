"""GRPO and PPO as pure functions in JAX."""

from grpo_jax import advantages, algorithms, distributions, divergences, losses, slots
from grpo_jax.algorithms import GRPO, PPO, Algorithm
from grpo_jax.config import Config
from grpo_jax.evaluation import evaluate
from grpo_jax.generation import generate
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.losses import grpo_loss, ppo_loss
from grpo_jax.training import make_init, make_train_step, run
from grpo_jax.types import TrainState

__all__ = [
    "GRPO",
    "PPO",
    "Algorithm",
    "Config",
    "Hyperparams",
    "TrainState",
    "advantages",
    "algorithms",
    "distributions",
    "divergences",
    "evaluate",
    "generate",
    "grpo_loss",
    "losses",
    "make_init",
    "make_train_step",
    "ppo_loss",
    "run",
    "slots",
]
