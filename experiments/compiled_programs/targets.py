"""The accelerators that programs are compiled for without having one."""

import importlib.util
import math
from typing import Any, NamedTuple

from jax.experimental import topologies

from grpo_jax.errors import ConfigError

_GPU_CONFIG = """
gpu_device_info {{
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_core: {shared_memory} shared_memory_per_block_optin: {block_memory}
  core_count: {cores} fpus_per_core: {lanes} clock_rate_ghz: {clock} l2_cache_size: {cache}
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""
# XLA records fewer operations in CUDA graphs for older versions of CUDA than 12.9, or if there is no version.


class Target(NamedTuple):
    name: str
    platform: str  # as JAX lowers for it: "cuda" or "tpu"
    memory: int  # bytes
    bandwidth: float  # of the memory, bytes per second
    gpu: dict[str, Any] | None = None  # the rest of XLA's description of a GPU
    dimensions: int = 2  # of the network between the chips of a TPU

    @property
    def is_gpu(self) -> bool:
        return self.gpu is not None

    @property
    def backend(self) -> str:
        """The name of JAX's backend on such a device."""
        return "gpu" if self.is_gpu else "tpu"

    def devices(self, count: int) -> list[Any]:
        """Descriptions of this many devices, to compile for.

        Raises ConfigError if the compiler is not installed, or has no such number of devices in one system.
        """
        package = "jax_plugins.xla_cuda12" if self.is_gpu else "libtpu"
        if not _is_installed(package):
            raise ConfigError(
                f"the compiler for {self.name} ({package}) is not installed; pip install '.[accelerators]'"
            )
        try:
            if self.is_gpu:
                config = _GPU_CONFIG.format(bandwidth=self.bandwidth, memory=self.memory, **self.gpu)
                hosts = -(-count // 8)
                layout = f"1x{hosts}x{-(-count // hosts)}"  # slices × hosts × devices of a host
                found = topologies.get_topology_desc(self.name, "cuda", target_config=config, topology=layout)
            else:
                found = topologies.get_topology_desc(f"{self.name}:{tpu_topology(count, self.dimensions)}", "tpu")
        except (RuntimeError, NotImplementedError) as error:  # JAX's own errors among them
            raise ConfigError(
                f"{self.name} with {count} devices cannot be described: {error}; use a power of two, up to 256"
            ) from error
        return found.devices[:count]


def tpu_topology(count: int, dimensions: int) -> str:
    """The smallest topology with at least this many chips whose sides are nearly equal: 2x2 or 2x2x1, 2x4, 4x4, ..."""
    sides = [2, 2, 1][:dimensions]
    while math.prod(sides) < count:
        shortest = min(range(dimensions), key=lambda axis: (sides[axis], -axis))
        sides[shortest] *= 2
    return "x".join(map(str, sides))


def _is_installed(package: str) -> bool:
    parent = package.partition(".")[0]
    return importlib.util.find_spec(parent) is not None and importlib.util.find_spec(package) is not None


GIB = 2**30

TARGETS = {
    target.name: target
    for target in (
        Target(
            *("h100", "cuda", 84_978_434_048, 3.352e12),
            gpu={"name": "NVIDIA H100 80GB HBM3", "major": 9, "cores": 132, "lanes": 128, "clock": 1.98}
            | {"cache": 52_428_800, "shared_memory": 233_472, "block_memory": 232_448},
        ),
        Target(
            *("a100", "cuda", 84_974_239_744, 2.039e12),
            gpu={"name": "NVIDIA A100-SXM4-80GB", "major": 8, "cores": 108, "lanes": 64, "clock": 1.41}
            | {"cache": 41_943_040, "shared_memory": 167_936, "block_memory": 166_912},
        ),
        Target("v5e", "tpu", 16 * GIB, 8.19e11),
        Target("v5p", "tpu", 95 * GIB, 2.765e12, dimensions=3),
        Target("v6e", "tpu", 32 * GIB, 1.64e12),
    )
}
