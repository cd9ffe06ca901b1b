"""GRPO and PPO as pure functions in JAX."""

from grpo_jax import algorithms, baselines, environments, objectives, policies, recording
from grpo_jax.algorithms import GRPO, PPO, Algorithm, with_reference
from grpo_jax.config import Config
from grpo_jax.devices.mesh import make_mesh
from grpo_jax.evaluation.answers import answer
from grpo_jax.evaluation.episodes import evaluate
from grpo_jax.evaluation.generation import Sampling, generate
from grpo_jax.groups import ANCHORED, CONTINUE, FRESH, forked
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import grpo_loss, ppo_loss
from grpo_jax.recording import Recording, TrainedPolicy, load, recorded_run
from grpo_jax.sweeps import plot, sweep
from grpo_jax.training.evaluations import Evaluate, no_progress, reached_return
from grpo_jax.training.imitation import warm_start
from grpo_jax.training.run import run
from grpo_jax.training.train import make_init, make_train
from grpo_jax.training.train_step import make_train_step
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
    "Evaluate",
    "Hyperparams",
    "Recording",
    "Sampling",
    "TrainState",
    "TrainedPolicy",
    "__version__",
    "algorithms",
    "answer",
    "baselines",
    "environments",
    "evaluate",
    "forked",
    "generate",
    "grpo_loss",
    "load",
    "make_init",
    "make_mesh",
    "make_train",
    "make_train_step",
    "no_progress",
    "objectives",
    "plot",
    "policies",
    "ppo_loss",
    "reached_return",
    "recorded_run",
    "recording",
    "run",
    "sweep",
    "warm_start",
    "with_reference",
]


def __dir__() -> list[str]:
    return __all__
