"""GRPO and PPO as pure functions in JAX."""

from grpo_jax import algorithms
from grpo_jax.algorithms import GRPO, PPO, Algorithm, with_reference
from grpo_jax.config.config import Config
from grpo_jax.devices.mesh import make_mesh
from grpo_jax.evaluation.episodes import evaluate
from grpo_jax.evaluation.generation import generate
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import advantages, divergences, losses, slots
from grpo_jax.objectives.losses import grpo_loss, ppo_loss
from grpo_jax.policies import distributions
from grpo_jax.recording.recorded_run import recorded_run
from grpo_jax.rollouts.starts import ANCHORED, CONTINUE, FRESH, forked
from grpo_jax.training.run import run
from grpo_jax.training.train_step import make_init, make_train_step
from grpo_jax.types import TrainState

__version__ = "0.1.0"

__all__ = [
    "ANCHORED",
    "CONTINUE",
    "FRESH",
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
    "forked",
    "generate",
    "grpo_loss",
    "losses",
    "make_init",
    "make_mesh",
    "make_train_step",
    "ppo_loss",
    "recorded_run",
    "run",
    "slots",
    "with_reference",
]
