"""Runs that are kept and watched (host): metrics, checkpoints, trackers, warnings, statistics over seeds."""

from grpo_jax.recording.metrics_file import read_metrics
from grpo_jax.recording.metrics_logger import MetricsLogger
from grpo_jax.recording.recorder import recorded_run
from grpo_jax.recording.run_folder import Recording, StopSignal
from grpo_jax.recording.statistics import (
    Curve,
    bootstrap_interval,
    iqm,
    learning_curve,
    pass_at_k,
)
from grpo_jax.recording.trackers import TensorBoard, Tracker, WeightsAndBiases
from grpo_jax.recording.trained_policy import TrainedPolicy, load
from grpo_jax.recording.training_warnings import TrainingWarnings
from grpo_jax.runs.run_spec import RunSpec, Setting, Settings, settings_of

__all__ = [
    "Curve",
    "MetricsLogger",
    "Recording",
    "RunSpec",
    "Setting",
    "Settings",
    "StopSignal",
    "TensorBoard",
    "Tracker",
    "TrainedPolicy",
    "TrainingWarnings",
    "WeightsAndBiases",
    "bootstrap_interval",
    "iqm",
    "learning_curve",
    "load",
    "pass_at_k",
    "read_metrics",
    "recorded_run",
    "settings_of",
]
