"""How programs are compiled where compiling them takes longer than running them."""

import jaxlib.version

CHEAP_XLA_FLAGS = "--xla_backend_optimization_level=0"
if jaxlib.version.__version_info__ < (0, 11):
    # Compiling fusions through MLIR takes three times as long. jaxlib 0.11 refuses the flag as unknown.
    CHEAP_XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
