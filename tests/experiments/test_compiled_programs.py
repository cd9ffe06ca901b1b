"""What an H100 would execute is counted from XLA's texts, and of a train step it does not rise."""

import jax
import pytest
from compilation import compile_for_h100

from experiments.compiled_programs import count, launches, read_events
from experiments.harness.reference_implementations import Size
from experiments.harness.workloads import make_implementation

PROGRAM = """
  %rollout = (s32[]) while(%start), condition=%c0, body=%b0, backend_config={"known_trip_count":{"n":"32"}}
  %epochs = (s32[]) while(%start), condition=%c1, body=%b1, backend_config={"known_trip_count":{"n":"4"}}
  %minibatches = (s32[]) while(%g), condition=%c2, body=%b2, backend_config={"known_trip_count":{"n":"4"}}
"""
THUNKS = """000: kCommandBuffer [source       | next=002 (1)]
    001: kCopy         [source       | sink        ] kCopy
002: kWhile         [prev=000 (1) | next=006 (1)]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        004: kDynamicSliceFusion [source | next=005 (1)] params=1, results=1
            005: kCustomKernel [source | sink] slice grid: [1, 1, 1]
        006: kCustomKernel [source | sink] gemm_fusion_dot grid: [1, 1, 1]
007: kWhile         [prev=007 (1) | next=010 (1)]
condition:
    008: kCustomKernel [source | sink] compare_1 grid: [1, 1, 1]
  body:
    009: kCustomKernel [source | sink] add grid: [1, 1, 1]
010: kWhile         [prev=008 (1) | sink]
condition:
    011: kCustomKernel [source | sink] compare_2 grid: [1, 1, 1]
  body:
    012: kCustomKernel [source | sink] shuffle grid: [1, 1, 1]
    013: kWhile         [source | sink]
condition:
        014: kCustomKernel [source | sink] compare_3 grid: [1, 1, 1]
      body:
        015: kCublasLtMatmul [source | sink] gemm
"""
NAMES = {2: "rollout", 7: "of unknown length", 10: "epochs", 13: "minibatches"}


def test_launches_waits_and_graphs_of_a_listing():
    metadata = "\n".join(f'profile_annotation: "{name}"\n thunk_id: {number}' for number, name in NAMES.items())
    events = read_events(PROGRAM, THUNKS, metadata)
    # A copy; 2 kernels, 32 times; a condition and an iteration of unknown number; 4 shuffles and 16 products.
    found = launches(events, num_steps=128, num_gradient_steps=16)
    assert found == {"launches": 1 + 64 + 2 + 20, "each_step": 0.5, "each_gradient": 1.0, "graphs": 33, "waits": 2}
    assert launches(events, num_steps=9, num_gradient_steps=7)["each_step"] != 0.5, "no such loop"


@pytest.mark.slow
def test_launches_do_not_rise():
    """Without a GPU: compiled ahead of time; 5.25 launches an environment step and 28 a gradient step."""
    compile_for_h100(lambda x: x, jax.ShapeDtypeStruct((), "float32"))  # skips the test without the compiler
    size = Size(1024)
    found = count(make_implementation("PPO", "CartPole-v1", size, execution_plan="hopper"), size)
    assert found["waits"] == 0 < found["graphs"] and 0 < found["mebibytes"] < 100
    assert 3 < found["each_step"] <= 5.5 and 20 < found["each_gradient"] <= 30
