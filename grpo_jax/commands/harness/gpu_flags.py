"""Settings of XLA and JAX for NVIDIA GPUs, by name. `command` applies them before JAX looks for its devices.

All but "float32" change how a program runs, not what it computes. The environment variable GRPO_JAX_GPU_SETTINGS
chooses: "loop_graphs float32", for example, or nothing for none. By default `DEFAULTS` are applied. What the user has
set by the variables of XLA and JAX is kept. docs/accelerators.md says what each is for, and what is known of it.
"""

import glob
import os

import jax

from grpo_jax.errors import ConfigError, nearest

SETTINGS: dict[str, dict[str, str]] = {
    # Loops and branches become part of CUDA graphs, a loop of known length with a copy of its body for each iteration.
    "loop_graphs": {
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL --xla_gpu_command_buffer_unroll_loops=true"
    },
    # Devices compute while they communicate.
    "latency_hiding": {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true"},
    # Matrix products of float32 numbers in float32; by default JAX rounds their inputs to TF32, 10 bits of mantissa.
    "float32": {"JAX_DEFAULT_MATMUL_PRECISION": "float32"},
    # JAX takes 90% of a device's memory at the start; by default 75%.
    "more_memory": {"XLA_CLIENT_MEM_FRACTION": "0.9"},
    # JAX takes memory when it is needed, for devices that others use too.
    "on_demand_memory": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}
"""The environment variables of each setting."""

# None has been timed on a device yet, and each can lose: memory, time of compilation, or time of a step.
DEFAULTS: tuple[str, ...] = ()
CHOICE = "GRPO_JAX_GPU_SETTINGS"
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg")  # the second one under WSL

_FLAGS = "XLA_FLAGS"
_OLD_NAMES = {"XLA_CLIENT_MEM_FRACTION": "XLA_PYTHON_CLIENT_MEM_FRACTION"}  # JAX refuses both


def has_gpu() -> bool:
    """Whether the host has a GPU; looks at files only, so that JAX's backend does not start."""
    return any(glob.glob(pattern) for pattern in DEVICES)


def apply_gpu_flags() -> None:
    """Sets the chosen settings where JAX will use a GPU. To be called before JAX looks for its devices.

    On other hosts, and for other platforms, nothing is set: an XLA that does not know a flag ends the process.

    Raises:
      ConfigError: for an unknown setting.
    """
    names = os.environ.get(CHOICE, " ".join(DEFAULTS)).replace(",", " ").split()
    for name in names:
        if name not in SETTINGS:
            raise ConfigError(f"{CHOICE} has the unknown setting {name!r}: {nearest(name, SETTINGS)}")
    platforms = (jax.config.jax_platforms or "cuda").split(",")
    if not (has_gpu() and {"cuda", "gpu"} & set(platforms)):
        return
    for name in names:
        for variable, value in SETTINGS[name].items():
            _set(variable, value)


def flags_in_use() -> dict[str, str]:
    """The variables of the settings that have a value, here or by the user."""
    variables = dict.fromkeys(variable for setting in SETTINGS.values() for variable in setting)
    return {variable: os.environ[variable] for variable in variables if os.environ.get(variable)}


def _set(variable: str, value: str) -> None:
    """Gives an environment variable its value, or adds flags to it, unless the user has set it, or the flag."""
    current = os.environ.get(variable)
    if variable == _FLAGS:
        if current and not current.startswith("-"):
            return  # the name of a file with flags
        present = {flag.partition("=")[0] for flag in (current or "").split()}
        flags = [flag for flag in value.split() if flag.partition("=")[0] not in present]
        os.environ[variable] = " ".join([current or "", *flags]).strip()
    elif current is None and _OLD_NAMES.get(variable) not in os.environ:
        os.environ[variable] = value
        if variable.startswith("JAX_"):  # which JAX has read when it was imported
            jax.config.update(variable.lower(), value)
