"""Compiles for an H100 that is not there: XLA's ahead-of-time compiler needs the CUDA plugin, but no device."""

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

DESCRIPTION = """gpu_device_info {
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 } } platform_name: "CUDA"
  dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3" """


def compile_for_h100(function, *arguments):
    """The compiled program; skips the test without the plugin of jax[cuda12]."""
    plugin = pytest.importorskip("jax_plugins.xla_cuda12")
    from jax._src.lib import xla_client

    if jax.devices() and not xla_client.pjrt_plugin_loaded("cuda"):
        xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin._get_library_path()))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    topology = topologies.get_topology_desc("h100", "cuda", target_config=DESCRIPTION, topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments)
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
