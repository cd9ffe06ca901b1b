"""Reading compiled programs, on excerpts of their text; with the extra `accelerators`, also real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import accelerators
from experiments.compiled_programs import hlo, targets
from experiments.compiled_programs.ahead_of_time import Case, what_fits
from experiments.compiled_programs.gpu_program import SORT_KERNELS, Costs, Event, read_events
from experiments.compiled_programs.implementations import NAMES, TOKENS, by_environment, make_workload
from experiments.compiled_programs.program_tables import draw, fits_table, tables
from grpo_jax.errors import ConfigError

# A rollout of 128 steps in 64 iterations, a loop of unknown length, 4 epochs of 4 minibatches, each in 2 parts.
HLO = """HloModule jit_step, is_scheduled=true

%fused_slice (table: f32[128,64], i: s32[]) -> f32[1,64] {
  %table = f32[128,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice.1 = f32[1,64]{1,0} dynamic-slice(%table, %i, %zero), dynamic_slice_sizes={1,64}
}

%fused_update (whole: f32[128,64], row: f32[1,64], j: s32[]) -> f32[128,64] {
  %whole = f32[128,64]{1,0} parameter(0)
  %row = f32[1,64]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %update.1 = f32[128,64]{1,0} dynamic-update-slice(%whole, %row, %j, %nought)
}

%fused_sort (keys: u32[1024]) -> u32[1024] {
  %keys = u32[1024]{0} parameter(0)
  ROOT %sort.1 = u32[1024]{0} sort(%keys), dimensions={0}, to_apply=%less
}

%rollout_condition (a: (s32[], f32[8,8])) -> pred[] {
  %a = (s32[], f32[8,8]{1,0}) parameter(0)
  %limit = s32[] constant(64)
  %counter = s32[] get-tuple-element(%a), index=0
  ROOT %lt = pred[] compare(%counter, %limit), direction=LT
}

%rollout_body (b: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %b = (s32[], f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%b), index=1
  %slice = f32[1,64]{1,0} fusion(%history, %n), kind=kLoop, calls=%fused_slice
  %dot.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out.1 = (s32[], f32[8,8]{1,0}) tuple(%n, %dot.1)
}

%unknown_condition (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %one = s32[] get-tuple-element(%c), index=0
  %other = s32[] get-tuple-element(%c), index=1
  ROOT %lt.2 = pred[] compare(%one, %other), direction=LT
}

%unknown_body (d: (s32[], s32[])) -> (s32[], s32[]) {
  ROOT %d = (s32[], s32[]) parameter(0)
}

%part_body (e: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %e = (s32[], f32[8,8]{1,0}) parameter(0)
  %y = f32[8,8]{1,0} get-tuple-element(%e), index=1
  %gemm = f32[8,8]{1,0} custom-call(%y, %y), custom_call_target="__cublas$lt$matmul"
  %all-reduce.1 = f32[8,8]{1,0} all-reduce(%gemm), replica_groups={{0,1}}, to_apply=%add
  ROOT %out.2 = (s32[], f32[8,8]{1,0}) tuple(%n, %all-reduce.1)
}

%minibatch_body (f: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %f = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %parts = (s32[], f32[8,8]{1,0}) while(%f), condition=%c4, body=%part_body, backend_config={"known_trip_count":{"n":"2"}}
}

%epoch_body (g: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %g = (s32[], f32[8,8]{1,0}) parameter(0)
  %shuffle = u32[1024]{0} fusion(%all_keys), kind=kCustom, calls=%fused_sort
  ROOT %minibatches = (s32[], f32[8,8]{1,0}) while(%g), condition=%c3, body=%minibatch_body, backend_config={"known_trip_count":{"n":"4"}}
}

ENTRY %main (state: f32[8,8], history: f32[128,64], all_keys: u32[1024]) -> f32[8,8] {
  %state = f32[8,8]{1,0} parameter(0)
  %history = f32[128,64]{1,0} parameter(1)
  %all_keys = u32[1024]{0} parameter(2)
  %n = s32[] constant(0)
  %copy.1 = f32[8,8]{1,0} copy(%state)
  %start = (s32[], f32[8,8]{1,0}) tuple(%n, %copy.1)
  %rollout = (s32[], f32[8,8]{1,0}) while(%start), condition=%rollout_condition, body=%rollout_body
  %update = f32[128,64]{1,0} fusion(%history, %slice, %n), kind=kLoop, calls=%fused_update
  %gather-start = (f32[8,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%copy.1), dimensions={0}
  %gather-done = f32[16,8]{1,0} all-gather-done(%gather-start)
  %unknown = (s32[], s32[]) while(%start), condition=%unknown_condition, body=%unknown_body
  %epochs = (s32[], f32[8,8]{1,0}) while(%start), condition=%c1, body=%epoch_body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %result = f32[8,8]{1,0} get-tuple-element(%epochs), index=1
}
"""  # noqa: E501

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
007: kKernel        [prev=002 (1) | next=008 (1)] update
008: kWhile         [prev=007 (1) | next=010 (1)]
condition:
    009: kCustomKernel [source | sink] compare_1 grid: [1, 1, 1]
  body:
    010: kCustomKernel [source | sink] add grid: [1, 1, 1]
011: kWhile         [prev=008 (1) | sink]
condition:
    012: kCustomKernel [source | sink] compare_2 grid: [1, 1, 1]
  body:
    013: kCustomKernel [source | sink] shuffle grid: [1, 1, 1]
    014: kCustomKernel [source | sink] shuffle grid: [1, 1, 1]
    015: kWhile         [source | sink]
condition:
        016: kCustomKernel [source | sink] compare_3 grid: [1, 1, 1]
      body:
        017: kCublasLtMatmul [source | sink] gemm
"""
NAMES_OF_THUNKS = {
    **{1: "copy.1", 2: "rollout", 5: "slice", 6: "dot.1", 7: "update", 8: "unknown", 11: "epochs"},
    **{13: "shuffle", 14: "shuffle", 15: "minibatches", 17: "gemm"},
}
METADATA = "\n".join(
    f'thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}'
    for number, name in NAMES_OF_THUNKS.items()
)

# A gather, and an update in place, of another view of the array; an array that is updated twice; one that is new.
VIEWS = """HloModule jit_views

%fused_gather (table: u32[1,512,11], rows: s32[8,1]) -> u32[8,11] {
  %table = u32[1,512,11]{2,1,0} parameter(0)
  %rows = s32[8,1]{1,0} parameter(1)
  %flat = u32[512,11]{1,0} bitcast(%table)
  %again = u32[512,11]{1,0} reshape(%flat)
  ROOT %taken = u32[8,11]{1,0} gather(%again, %rows), offset_dims={1}, slice_sizes={1,11}
}

%fused_updates (whole: f32[128,64], twice: f32[128,64], row: f32[1,64], i: s32[]) -> (f32[8192], f32[128,64]) {
  %whole = f32[128,64]{1,0} parameter(0)
  %twice = f32[128,64]{1,0} parameter(1)
  %row = f32[1,64]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %view = f32[128,64]{1,0} bitcast(%whole)
  %old = f32[1,64]{1,0} dynamic-slice(%view, %i, %i), dynamic_slice_sizes={1,64}
  %sum = f32[1,64]{1,0} add(%old, %row)
  %one = f32[128,64]{1,0} dynamic-update-slice(%view, %sum, %i, %i)
  %flat.1 = f32[8192]{0} bitcast(%one)
  %two = f32[128,64]{1,0} dynamic-update-slice(%twice, %row, %i, %i)
  %three = f32[128,64]{1,0} dynamic-update-slice(%two, %row, %i, %i)
  ROOT %both = (f32[8192]{0}, f32[128,64]{1,0}) tuple(%flat.1, %three)
}

%fused_new (row.1: f32[1,64], j: s32[], read: f32[64]) -> (f32[128,64], f32[8,8]) {
  %row.1 = f32[1,64]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %read = f32[64]{0} parameter(2)
  %zero = f32[] constant(0)
  %zeros = f32[128,64]{1,0} broadcast(%zero), dimensions={}
  %filled = f32[128,64]{1,0} dynamic-update-slice(%zeros, %row.1, %j, %j)
  %square = f32[8,8]{1,0} bitcast(%read)
  ROOT %new.1 = (f32[128,64]{1,0}, f32[8,8]{1,0}) tuple(%filled, %square)
}

ENTRY %main () -> u32[8,11] {
  %gathered = u32[8,11]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused_gather
  %updated = (f32[8192]{0}, f32[128,64]{1,0}) fusion(%c, %d, %e, %f), kind=kLoop, calls=%fused_updates
  ROOT %new = (f32[128,64]{1,0}, f32[8,8]{1,0}) fusion(%g, %h, %k), kind=kLoop, calls=%fused_new
}
"""


def test_bytes_of_arrays_that_are_read_or_updated_through_a_view():
    names = {1: "gathered", 2: "updated", 3: "new"}
    thunks = "\n".join(f"00{number}: kCustomKernel [source | sink]" for number in names)
    metadata = "\n".join(f'profile_annotation: "{name}"\n thunk_id: {number}' for number, name in names.items())
    row, whole = 256, 128 * 256
    assert [event.bytes for event in read_events(hlo.parse(VIEWS), thunks, metadata)] == [
        2 * 8 * 11 * 4 + 8 * 4,
        (row + row + 4) + (row + 2 * row),  # read: a slice, the update and its index; written: three updates
        (row + 4 + 256) + (row + whole + 256),
    ]


@pytest.fixture(scope="module")
def program():
    return hlo.parse(HLO)


def test_loops_and_their_lengths(program):
    paths = {here.name: (*path, program.trips(here)) for here, path in program.walk() if here.operation == "while"}
    assert program.entry == "main"
    assert {name: path[-1] for name, path in paths.items()} == {
        **{"rollout": 64, "unknown": None, "epochs": 4, "minibatches": 4, "parts": 2}
    }
    assert hlo.known_trips(program.instructions["rollout"]) is None, "XLA did not note it"
    assert [loop.name for loop in paths["parts"][:-1]] == ["epochs", "minibatches"]


def test_the_rollout_may_be_unrolled_and_minibatches_may_be_in_parts(program):
    phases = hlo.find_phases(program, num_steps=128, num_gradient_steps=16)
    assert (phases.rollout.name, phases.gradient.name) == ("rollout", "minibatches")
    paths = {here.name: path for here, path in program.walk()}
    assert [phases.of(paths[name]) for name in ("dot.1", "gemm", "shuffle", "copy.1")] == [
        *("rollout", "gradient", "rest", "rest")
    ]
    assert hlo.find_phases(program, num_steps=127, num_gradient_steps=15) == (None, None)


def test_bytes_of_types():
    assert hlo.num_bytes("(f32[128,64]{1,0:T(8,128)}, pred[3], /*index=2*/bf16[], u32[2]{0})") == 4 * 8192 + 3 + 2 + 8


def test_events_of_a_gpu(program):
    events = read_events(program, THUNKS, METADATA)
    assert [(event.kind, event.times, event.in_graph, event.bytes, len(event.path)) for event in events] == [
        ("graph", 1, False, 0, 0),
        ("copy", 1, True, 2 * 256, 0),
        ("wait", 65, False, 0, 0),  # XLA did not note the length of the rollout's loop, so its condition decides
        ("kernel", 64, False, 0, 1),
        ("graph", 64, False, 0, 1),
        ("kernel", 64, True, 256 + 256 + 4, 1),  # a row of the table, not the table
        ("kernel", 64, True, 3 * 256, 1),
        ("kernel", 1, False, 256 + 256 + 4, 0),  # a row of the array, in place
        ("wait", 2, False, 0, 0),  # one iteration is counted
        ("kernel", 1, False, 0, 1),
        ("kernel", 1, False, 0, 1),
        ("kernel", 4 * SORT_KERNELS, False, 2 * 4096, 1),  # no conditions from here on
        ("kernel", 0, False, 2 * 4096, 1),  # the same sort
        ("kernel", 16, False, 3 * 256, 2),
    ]


def test_model_of_time():
    costs = Costs(bandwidth=1e6, launch=2.0, launch_in_graph=1.0, wait=10.0)
    events = [
        Event("kernel", 3, False, 0, ()),
        Event("copy", 5, True, 0, ()),
        Event("kernel", 7, True, 4_000_000, ()),
        Event("graph", 2, False, 0, ()),
        Event("wait", 1, False, 0, ()),
    ]
    assert costs.seconds(events) == 3 * 2 + 5 * 1 + 7 * 4 + 2 * 2 + 10


def test_communication(program):
    found = [(one.operation, one.times, one.bytes) for one in hlo.read_collectives(program)]
    assert found == [("all-gather", 1, 512), ("all-reduce", 32, 256)]


def test_topologies_of_tpus():
    for dimensions, expected in ((2, {1: "2x2", 8: "2x4", 64: "8x8"}), (3, {4: "2x2x1", 8: "2x2x2", 64: "4x4x4"})):
        assert {count: targets.tpu_topology(count, dimensions) for count in expected} == expected


def row(name="PPO", num_envs=1, total_bytes=0, **others):
    case = Case(name, "CartPole-v1", num_envs, 1, {})._asdict()
    return {"target": "h100", **case, "total_bytes": total_bytes, **others}


def test_what_fits():
    target = targets.TARGETS["h100"]._replace(memory=1_000_000)
    rows = [row(num_envs=n, total_bytes=100_000 + 50 * n) for n in (10, 100, 1000)] + [row("GRPO", 10, 1)]
    rows += [row("kernel_gae", num_envs, total_bytes=7) for num_envs in (10, 20)]
    (fits,) = what_fits([*rows, row(num_envs=5000, error="too large")], target)
    assert (fits["name"], fits["environments_times_seeds"], fits["bytes_each"]) == ("PPO", 16_000, 50)


def test_tables_and_picture(tmp_path):
    numbers = {"num_steps": 128, "num_gradient_steps": 16, "has_rollout_loop": True, "has_gradient_loop": False}
    numbers |= {"launches": 1300, "launches_by_phase": {"rollout": 1280, "gradient": 0, "rest": 20}, "copies": 1}
    numbers |= {"graphs": 2, "waits": 0, "bytes_accessed": 1e9, "model_seconds": 0.002, "argument_bytes": 1}
    numbers |= {"collectives": {"rollout": 128, "gradient": 0, "rest": 0}, "communicated_bytes": 10}
    numbers |= {"temporary_bytes": 1, "compile_seconds": 1.0, "options": {"xla_gpu_enable_triton_gemm": False}}
    rows = [row(num_envs=n, **numbers) for n in (8, 16)] + [row("GRPO", error="too large")]
    (programs,) = tables(targets.TARGETS["h100"], "CartPole-v1", rows)
    cells = {column.header: list(column.cells) for column in programs.columns}
    assert cells["launches"] == ["1,300", "1,300", "error"]
    assert cells["/step"][0] == "10.0" and cells["/gradient"][0] == "?"
    assert "mesh" not in cells and programs.caption.endswith("PPO")
    _, communication = tables(targets.TARGETS["v5e"], "CartPole-v1", [rows[0] | {"mesh": {"envs": 8}}])
    assert list(communication.columns[1].cells) == ["envs=8"]
    assert fits_table([{"name": "PPO", "mesh": {}, "environments_times_seeds": 5, "bytes_each": 2048.0}]).row_count == 1
    draw(rows[:2], tmp_path / "launches.png")
    assert (tmp_path / "launches.png").stat().st_size > 1000


def test_token_tasks_are_environments_of_their_own():
    assert by_environment(("PPO", "GRPO, tokens"), ("CartPole-v1",)) == [
        ("CartPole-v1", ("PPO",)),
        (TOKENS, ("GRPO, tokens",)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_implementations_do_the_same_work(name):
    if name == "rejax PPO":
        pytest.importorskip("rejax")
    special = {"GRPO, tokens": TOKENS, "relative positions": "Breakout-MinAtar"}
    workload = make_workload(name, special.get(name, "CartPole-v1"), 16, "gpu")
    assert workload.num_gradient_steps == 16
    assert workload.num_steps == (4 if name == "GRPO, tokens" else 128)


def test_mistakes_cost_nothing(tmp_path):
    for wrong, message in (
        ({"options": ("xla_gpu_autotune_level",)}, "NAME=VALUE"),
        ({"meshes": ("chips=8",)}, "--meshes chips=8"),
        ({"execution_plan": "gpus"}, "gpu"),
        ({"profile": Path("profiles")}, "none is attached"),
    ):
        with pytest.raises(ConfigError, match=message):
            accelerators.main(accelerators.Arguments(out=tmp_path / "new", **wrong))
        assert not (tmp_path / "new").exists()


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(targets, "_is_installed", lambda package: False)
    for name in ("a100", "v5e"):
        with pytest.raises(ConfigError, match=r"\[accelerators\]"):
            targets.TARGETS[name].devices(1)


def test_what_cannot_be_built_is_an_error_of_its_row():
    target, case = targets.TARGETS["h100"], Case("kernel_gae", "CartPole-v1", 1, 1, {})
    (found,) = accelerators.compile_cases([case], target, "gpu", {})
    assert "num_envs" in found["error"] and "launches" not in found


@pytest.mark.slow
def test_steps_are_timed_and_profiled(tmp_path):
    """On the CPU, as on an accelerator."""
    cases = [Case("PPO", "CartPole-v1", 16, num_seeds, {}) for num_seeds in (1, 2)]
    cases.append(Case("PPO", "Breakout-MinAtar", 16, 1, {}))
    rows = [case._asdict() for case in cases]
    rows[-1]["error"] = "it cannot be built"
    arguments = accelerators.Arguments(repeats=1, seconds=0.0, profile=tmp_path)
    accelerators.measure_cases(rows, cases, "cpu", {}, arguments)
    assert [row.get("measured_seconds", 0) > 0 for row in rows] == [True, True, False]
    assert len(list(tmp_path.glob("*/plugins/profile/*/*.xplane.pb"))) == 2


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there(tmp_path):
    """In a process of its own, in which JAX has not looked for its devices."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    arguments = ["--targets", "h100", "--environments", "CartPole-v1", "--num-envs", "1024"]
    arguments += ["--implementations", "plain PPO", "PPO", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "experiments.accelerators", *arguments]
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["programs"]) == 2
    for program in summary["programs"]:
        assert program["has_rollout_loop"] and program["has_gradient_loop"]
        assert program["waits"] == 0 and program["graphs"] > 0
        by_phase = program["launches_by_phase"]
        assert sum(by_phase.values()) == program["launches"] > program["copies"] > 0
        assert by_phase["rollout"] % 32 == by_phase["gradient"] % 16 == 0
        assert 0 < program["model_ratio"] and program["model_seconds"] < 1
    assert (tmp_path / "launches.png").stat().st_size > 1000
