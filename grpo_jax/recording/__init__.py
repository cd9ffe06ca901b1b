"""Recording runs, on the host: metrics, checkpoints, trackers, warnings, and statistics over seeds."""

from grpo_jax.recording.statistics import (
    Curve,
    bootstrap_interval,
    iqm,
    learning_curve,
    pass_at_k,
    performance_profile,
    probability_of_improvement,
    steps_to_reach,
)

__all__ = [
    "Curve",
    "bootstrap_interval",
    "iqm",
    "learning_curve",
    "pass_at_k",
    "performance_profile",
    "probability_of_improvement",
    "steps_to_reach",
]
