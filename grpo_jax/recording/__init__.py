"""Runs that are kept and watched (host): metrics, checkpoints, trackers, warnings, statistics over seeds.

`Checkpoints` is in `grpo_jax.recording.checkpoint`, which imports orbax and so takes a second.
"""

from grpo_jax.recording.alarms import Alarms
from grpo_jax.recording.files import read_metrics
from grpo_jax.recording.logbook import Logbook
from grpo_jax.recording.plan import Plan
from grpo_jax.recording.recorder import recorded_run
from grpo_jax.recording.rows import Settings, settings_of
from grpo_jax.recording.settings import Recording
from grpo_jax.recording.signals import StopSignal
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
from grpo_jax.recording.trackers import TensorBoard, Tracker, WeightsAndBiases
from grpo_jax.recording.trained_policy import TrainedPolicy, load

__all__ = [
    "Alarms",
    "Curve",
    "Logbook",
    "Plan",
    "Recording",
    "Settings",
    "StopSignal",
    "TensorBoard",
    "Tracker",
    "TrainedPolicy",
    "WeightsAndBiases",
    "bootstrap_interval",
    "iqm",
    "learning_curve",
    "load",
    "pass_at_k",
    "performance_profile",
    "probability_of_improvement",
    "read_metrics",
    "recorded_run",
    "settings_of",
    "steps_to_reach",
]
