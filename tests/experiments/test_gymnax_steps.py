"""The study of gymnax's own steps and the lean ones: its table, and the sentences of its page."""

import json
from pathlib import Path

from experiments import gymnax_steps
from experiments.harness.summaries import SUMMARY, TABLE
from grpo_jax.environments.lean import LEAN

PAGE = Path(gymnax_steps.__file__).parent / "results" / "accelerators"
PROGRAM = {"launches": 1300, "launches_by_phase": {"rollout": 1280, "gradient": 160, "rest": 20}, "waits": 0}
PROGRAM |= {"num_steps": 128, "num_gradient_steps": 16, "model_seconds": 0.002}
PROGRAM |= {"has_rollout_loop": True, "has_gradient_loop": True}


def test_both_steps_are_in_one_row_and_what_is_there_is_not_found_out_again(tmp_path, monkeypatch, capsys):
    names = ("Catch-bsuite", "MemoryChain-bsuite")  # with a lean step, and without
    monkeypatch.setattr(gymnax_steps, "names", lambda: [*names, "MNISTBandit-bsuite"])
    launches = {True: 1300, False: 2000}  # of ours by name, and of gymnax's object
    monkeypatch.setattr(
        gymnax_steps,
        "compile_case",
        lambda case, *_: PROGRAM | {"launches": launches[isinstance(case.environment, str)], "waits": case.num_envs},
    )
    monkeypatch.setattr(gymnax_steps, "speeds", lambda steps, _: [12345.0] * len(steps))
    gymnax_steps.main(gymnax_steps.Arguments(num_envs=7, out=tmp_path))
    once = "1,300 | 10.0 | 10.0 | 7 | 2.0 | 12,300"
    twice = f"2,000 → {once}"
    assert capsys.readouterr().out.splitlines() == [f"{names[0]} | {twice}", f"{names[1]} | {once}"]
    assert (tmp_path / TABLE).read_text().splitlines()[2:] == [f"| {names[0]} | {twice} |", f"| {names[1]} | {once} |"]

    gymnax_steps.main(gymnax_steps.Arguments(num_envs=9, out=tmp_path))
    assert "| 7 |" in (tmp_path / TABLE).read_text()
    gymnax_steps.main(gymnax_steps.Arguments(environments=names[1:], parts=("programs",), num_envs=9, out=tmp_path))
    result = json.loads((tmp_path / SUMMARY).read_text())[names[1]]
    assert result["programs"][0]["waits"] == 9 and result["speeds"] == [12345.0]


def test_steps_are_timed():
    arguments = gymnax_steps.Arguments(repeats=1)
    (rate,) = gymnax_steps.speeds(["MemoryChain-bsuite"], arguments, num_envs=2, num_steps=4)
    assert rate > 0


def test_the_page_has_what_the_study_found():
    results = json.loads((PAGE / "gymnax" / SUMMARY).read_text())
    lines = (PAGE / "gymnax" / TABLE).read_text().splitlines()[2:]
    assert lines == [f"| {' | '.join(gymnax_steps.row(name, result))} |" for name, result in results.items()]
    assert {name for name, result in results.items() if len(result["programs"]) == len(result["speeds"]) == 2} == {
        *LEAN
    }
    ours = {name: result["programs"][-1] for name, result in results.items()}
    above = [name for name, program in ours.items() if program["launches_by_phase"]["rollout"] > 12 * 128]
    assert not any(program["waits"] for program in ours.values())
    text = " ".join((PAGE / "README.md").read_text().split())
    sentence = f"{len(ours) - len(above)} of {len(ours)} launch at most 12 kernels in an environment step"
    assert sentence in text and all(name in text.partition(sentence)[2] for name in above)
    for name in LEAN:
        before, after = results[name]["speeds"]
        assert f"{name.partition('-')[0]} {after / before:.2f}" in text
