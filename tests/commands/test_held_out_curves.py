"""Measurements on held-out prompts along a run of a language model, on completions that are given."""

import json
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_jax.commands.harness.command import make_console
from grpo_jax.commands.harness.held_out_points import advise
from grpo_jax.commands.harness.language_runs import HeldOutCurves, without_shared_beginning
from grpo_jax.errors import ConfigError
from grpo_jax.recording.run_folder import StopSignal
from grpo_jax.runs.progress import initial_progress

# [seeds, prompts, samples and the greedy one, tokens]; -1 after the end.
COMPLETIONS = np.array(
    [
        [[[5, 1, -1], [5, 2, 2], [5, -1, -1]], [[4, 1, -1], [4, 1, 1], [5, 1, -1]]],
        [[[5, 5, 5], [5, -1, -1], [4, -1, -1]], [[5, 1, -1], [4, -1, -1], [4, 2, -1]]],
    ]
)
SETTINGS = {"num_held_out": 2, "num_samples": 2, "sample_every": 2, "correct_at": 1.0, "keep_completions": 0}


def judge(_, completions, answers, iteration):
    """A reward of 1 for a first token of 5, and one of the number of tokens, which applies to those of several."""
    lengths = (completions >= 0).sum(-1)
    values = np.stack([completions[..., 0] == 5, lengths * (lengths > 1)], axis=-1)
    return values.astype(float), np.stack([lengths > 0, lengths > 1], axis=-1)


def curves(folder, *, received=(), checkpoint_every=None, stop_at_reward=None, **changes):
    """Of a task whose prompts are "a" for training, and "b" and a chat that ends with "c"."""
    recording = SimpleNamespace(wandb=None, checkpoint_every=checkpoint_every)
    task = SimpleNamespace(
        num_training=1,
        tokens=np.zeros((3, 4), int),
        judge=judge,
        rewards=[SimpleNamespace(name="five", weight=1.0), SimpleNamespace(name="length", weight=0.0)],
        is_cut=lambda completions, answers: (completions >= 0).all(-1),
        all_prompts=SimpleNamespace(contents=["a", "b", [{"role": "user", "content": "c"}]]),
        texts=lambda _, completions, answers: ["".join(map(str, each[each >= 0])) for each in completions],
    )
    plan = SimpleNamespace(
        keys="ab", config=SimpleNamespace(group_size=2), hyperparams=SimpleNamespace(num_iterations=10)
    )
    settings = SimpleNamespace(**SETTINGS | changes, recording=recording, stop_at_reward=stop_at_reward, seed=0)
    made = HeldOutCurves(task, plan, folder, make_console(), settings, received)
    made._complete = lambda states: (COMPLETIONS, np.full_like(COMPLETIONS, -1))
    return made


def progress(iteration, *, ended=False):
    begun, ended_by = initial_progress(None, 2), np.full(2, "total_steps" if ended else "")
    return begun._replace(iteration=iteration, steps=begun.steps + 100 * iteration, ended_by=ended_by)


def test_a_point_has_the_means_of_each_seed(tmp_path, capsys):
    measured = curves(tmp_path)
    assert measured(progress(0), None) is None
    for iteration in (1, 2, 3):
        measured(progress(iteration), "chunk")
    measured(progress(5, ended=True), "chunk")
    assert [point["iteration"] for point in measured.points] == [0, 2, 5], "every second, and the last"
    point = json.loads((tmp_path / "held_out.json").read_text())[1]
    assert point["tokens"] == [200, 200]
    assert point["rewards"] == {"five": [0.5, 0.75], "length": [2.5, 2.5]}
    assert point["errors"]["five"] == pytest.approx([0.35, 0.18], abs=0.01), "over two prompts"
    assert point["greedy"] == {"five": [1.0, 0.0], "length": [2.0, 2.0]}
    assert point["cut"] == [0.5, 0.25] and point["all_equal"] == [1.0, 0.5]
    assert point["pass_at_k"] == {"1": [0.5, 0.75], "2": [0.5, 1.0]}
    printed = capsys.readouterr().out
    assert "Rewards of 12 completions took" in printed
    assert "Held-out prompts after 2 iterations: five 0.625, length 2.500; pass@1 0.625, pass@2 0.750" in printed
    measured.finish()
    assert (tmp_path / "held_out.png").exists()
    assert re.search("five, greedy +0.500", capsys.readouterr().out)


def test_measurements_can_be_left_out(tmp_path, capsys):
    unmeasured = curves(tmp_path, sample_every=0)
    assert unmeasured(progress(0), None) is None and unmeasured(progress(5, ended=True), "chunk") is None
    unmeasured.finish()
    assert not unmeasured.points and not [*tmp_path.iterdir()] and not capsys.readouterr().out


def test_what_is_said_before_training():
    """What a pass@k of 0 means; and where all prompts begin alike, no more than where they differ."""
    never, rare = ({"pass_at_k": {"1": [0.0], "8": [share]}} for share in (0.0, 0.1))
    assert "never earns exact (pass@8 is 0)" in advise(never, "exact", False) and advise(rare, "exact", False) == ""
    texts = [f"2 + 3 =\n5\n\n12 + 2 =\n14\n\n1{i} + 4 =" for i in range(2)]
    assert without_shared_beginning(texts) == ["...10 + 4 =", "...11 + 4 ="]


def test_a_resumed_run_writes_its_points_and_samples_once(tmp_path):
    first = curves(tmp_path)
    for iteration in (0, 2, 4):
        first(progress(iteration), None if iteration == 0 else "chunk")
    resumed, path = curves(tmp_path), tmp_path / "held_out.json"
    resumed(progress(2), None)
    resumed(progress(4), "chunk")
    assert [point["iteration"] for point in resumed.points] == [0, 2, 4]
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0] * 4 + [2] * 4 + [4] * 4, "a line for each seed and prompt"
    assert {line["prompt"] for line in lines} == {"b", "c"}, "of a chat the last message"
    for line in lines:
        assert line["rewards"]["five"] == [text.startswith("5") for text in (*line["sampled"], line["greedy"])]
    for wrong in ('"cut": 1', '"cut": [0.5, "x"]', '"cut": [0.5]', '"turns": []'):
        path.write_text(re.sub(r'"cut": \[.*?\]', wrong, path.read_text(), count=1))
        with pytest.raises(ConfigError, match="held_out.json lacks numbers of this run, or has others: cut"):
            curves(tmp_path)


def test_a_seed_stops_at_its_reward_and_a_signal_stops_all(tmp_path):
    measured = curves(tmp_path, stop_at_reward=0.75)
    assert measured(progress(0), None) is None, "not before training"
    assert measured(progress(2), "chunk").stopped.tolist() == [False, True]
    with pytest.raises(StopSignal) as stopped:
        curves(tmp_path, received=[signal.SIGTERM])(progress(4), "chunk")
    assert stopped.value.name == "SIGTERM" and stopped.value.folder == tmp_path
    resumable = curves(tmp_path, received=[signal.SIGTERM], checkpoint_every=1)
    assert resumable(progress(0), None) is None, "the checkpoint is written first, by the run"
