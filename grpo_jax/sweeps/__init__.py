"""Sweeps: every setting with the same seeds, in few programs; a ranking, curves, pictures and policies of settings."""

from grpo_jax.sweeps.pictures import plot
from grpo_jax.sweeps.runs import Run, SweepResult
from grpo_jax.sweeps.sweep import sweep

__all__ = ["Run", "SweepResult", "plot", "sweep"]
