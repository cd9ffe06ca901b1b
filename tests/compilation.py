"""How programs are compiled where compiling them takes longer than running them."""

import jax

CHEAPLY = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    # Code for fused operations through MLIR takes three times as long to compile; later versions do not know the flag.
    CHEAPLY += " --xla_cpu_use_fusion_emitters=false"
