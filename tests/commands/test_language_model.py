"""The command for language models: from a tiny model to a trained folder, and errors in one line."""

import dataclasses
import io
import json
import operator
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from language_models import make_model, make_task
from safetensors.numpy import load_file

from grpo_jax import Hyperparams
from grpo_jax.commands import ask, lm
from grpo_jax.commands.harness import language_training
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.held_out_points import diagnose
from grpo_jax.commands.harness.language_runs import measurement_interval
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.language import RewardError, load_model, load_params, make_tiny_model, save_trained

REPOSITORY = Path(__file__).parents[2]
JUDGE = types.SimpleNamespace()
"""Gives so many `answers`, and then fails."""


def digits(completions, **fields):
    """The share of digits."""
    return [sum(map(str.isdecimal, text)) / max(len(text), 1) for text in completions]


def stopping(completions, **fields):
    """The share of digits, by a judge that may fail."""
    JUDGE.answers -= 1
    return digits(completions) if JUDGE.answers >= 0 else [None] * len(completions)


def sometimes(completions, **fields):
    """Applies to every other completion."""
    return [None if number % 2 else 1.0 for number, _ in enumerate(completions)]


def interrupting(completions, **fields):
    """Presses Ctrl-C once training has begun."""
    JUDGE.calls += 1
    if JUDGE.calls == 4:
        signal.raise_signal(signal.SIGINT)
    return [float(len(text)) for text in completions]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model, prompts, and a module of rewards."""
    for package in ("tokenizers", "jinja2"):
        pytest.importorskip(package)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = types.ModuleType("my_rewards")
    for function in (digits, stopping, sometimes, interrupting):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_tiny(width=32):
    make_tiny_model("tiny", Path("prompts.jsonl").read_text().splitlines(), num_layers=1, width=width, vocab_size=280)


def train(flags):
    fixed = "--model tiny --prompts prompts.jsonl --max-completion 6 --num-held-out 2"
    lm.main(lm.parse(f"{fixed} {flags}".split()))


def written(name):
    """What a run has written to a file in out/."""
    text = Path("out", name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def has_learnt():
    trained, first = (load_params(path)["actor"]["embedding"] for path in ("out/model", "tiny"))
    return not np.array_equal(trained, first)


@pytest.mark.slow
def test_a_model_is_trained_and_saved(folder):
    make_tiny()
    train("--reward my_rewards:digits --num-iterations 40 --learning-rate 1e-2 --sample-every 10 --out out")
    points = written("held_out.json")
    assert [point["iteration"] for point in points] == [0, 10, 20, 30, 40]
    before, after = (np.mean(points[i]["rewards"]["digits"]) for i in (0, -1))
    assert before < 0.25 and after > 0.5
    assert set(points[0]["pass_at_k"]) == {"1", "2", "4", "8"}
    assert has_learnt()


COUNTING = """
import json, sys, jax
from grpo_jax.commands import lm
counts = {}
jax.monitoring.register_event_listener(lambda event, **_: counts.update({event: counts.get(event, 0) + 1}))
lm.main(lm.parse(sys.argv[1:]))
print(json.dumps({event.split("/")[-1]: count for event, count in counts.items() if "compilation_cache" in event}))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(folder):
    """But a few keys before the cache is open. Each is a process of its own; no program has rewards or prompts."""
    make_tiny()
    (folder / "rewards.py").write_text("def lengths(completions): return [len(text) for text in completions]")
    flags = "--model tiny --prompts prompts.jsonl --reward rewards:lengths --max-completion 6 --num-iterations 2"
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": f"{folder}:{REPOSITORY}"}
    kept = []
    for number in range(2):
        command = [sys.executable, "-c", COUNTING, *flags.split(), "--out", f"out{number}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        counts = json.loads(done.stdout.splitlines()[-1])
        kept.append({path.name for path in (folder / "cache").rglob("*-cache")})
    assert kept[0] == kept[1] and counts["cache_hits"] > 20 and "cache_misses" not in counts, counts
    first, second = (load_params(f"{out}/model")["actor"]["embedding"] for out in ("out0", "out1"))
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_a_reward_that_fails_loses_nothing(folder, capsys):
    make_tiny()
    JUDGE.answers = 14  # two measurements on 2 held-out prompts, and ten iterations
    flags = "--reward my_rewards:stopping --num-iterations 20 --out out --sample-every 5 --checkpoint-every 5"
    with pytest.raises(SystemExit):
        command(lambda: train(flags))
    said = capsys.readouterr().err
    assert "error: no reward applies to the completion" in said
    assert "repeat the command with --resume --out out" in said and "Traceback" not in said
    JUDGE.answers = 1000
    train(f"{flags} --resume")
    iterations = [line["iteration"] for line in written("metrics.jsonl")]
    assert iterations == list(range(20))
    assert [line["iteration"] for line in written("completions.jsonl")] == np.repeat(iterations, 16).tolist()
    points = written("held_out.json")
    assert [point["iteration"] for point in points] == [0, 5, 10, 15, 20]


@pytest.mark.slow
def test_a_lora_run_keeps_adapters_and_goes_on_bitwise_from_the_same_model(folder):
    make_tiny(width=128)
    flags = "--reward my_rewards:stopping --num-iterations 6 --learning-rate 1e-2 --lora-rank 2 --checkpoint-every 2"
    JUDGE.answers = 1000
    train(f"{flags} --out whole")
    JUDGE.answers = 6  # a measurement on 2 held-out prompts takes one or two
    with pytest.raises(RewardError):
        train(f"{flags} --out cut")
    kept = sorted(path for path in (folder / "cut" / "checkpoints").glob("*/*") if path.name.isdigit())
    frozen = (folder / "tiny" / "model.safetensors").stat().st_size
    sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in kept]
    assert kept and max(sizes) < frozen / 5, (sizes, frozen)

    weights = (folder / "tiny" / "model.safetensors").read_bytes()
    model, params = load_model("tiny"), load_params("tiny")
    save_trained("tiny", model, jax.tree.map(lambda leaf: leaf * 1.01, params))
    JUDGE.answers = 1000
    with pytest.raises(ConfigError, match="frozen weights are not those that the run began with.*--model"):
        train(f"{flags} --out cut --resume")
    (folder / "tiny" / "model.safetensors").write_bytes(weights)
    train(f"{flags} --out cut --resume")
    name = "adapter/adapter_model.safetensors"
    assert (folder / "cut" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    assert any((tensor != 0).any() for key, tensor in load_file(folder / "whole" / name).items() if "lora_B" in key)
    assert not (folder / "whole" / "model").exists()


@pytest.mark.slow
def test_what_one_watches(folder, capsys):
    """Metrics of training, samples, lines of the log, and the reward that ends a run."""
    make_model("tiny", context=512)
    small = "--num-prompts 2 --group-size 4 --num-samples 2 --num-iterations 6 --sample-every 2"
    stops = "--stop-at-reward -5 --stop-string 7 --keep-completions all"
    train(f"--reward my_rewards:digits=2 --reward my_rewards:sometimes {small} {stops} --out out")
    lines = written("metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1]  # at the first measurement after the start
    for line in lines:
        parts = 2 * line["reward/digits_mean"][0] + 0.5 * line["reward/sometimes_mean"][0]  # of half of them
        np.testing.assert_allclose(parts, line["episode/return_mean"][0], rtol=1e-5)
        assert 0 < line["episode/cut_fraction"][0] <= 1 and line["reward/digits_std"][0] > 0
    for line, kept in zip(lines, np.split(np.array(written("completions.jsonl")), 2), strict=True):
        assert {(each["iteration"], each["seed"]) for each in kept} == {(line["iteration"], 0)} and len(kept) == 8
        assert np.mean([each["reward"] for each in kept]) == pytest.approx(line["episode/return_mean"][0], rel=1e-5)
        assert np.mean([each["cut"] for each in kept]) == line["episode/cut_fraction"][0]
        assert [each["rewards"]["sometimes"] for each in kept] == [1, None] * 4
    samples = written("samples.jsonl")
    assert [sample["iteration"] for sample in samples] == [0, 0, 2, 2]
    assert all("7" not in text[:-1] for sample in samples for text in [*sample["sampled"], sample["greedy"]])
    printed = capsys.readouterr().out
    assert "tokens a seed" in printed and "completions took " in printed
    assert printed.index("Reading prompts from") < printed.index("Loading the weights") < printed.index("compiling")
    assert "iteration 1, reward" in printed and "iteration 2, reward" in printed and " s an iteration, " in printed
    assert "steps" not in printed and "groups with a difference: " in printed and "tiny with prompts.jsonl" in printed
    summary, last = written("summary.json"), written("held_out.json")[-1]["rewards"]
    final = [pytest.approx(2 * last["digits"][0] + last["sometimes"][0])]
    assert summary["runs"][0]["final_return"]["per_seed"] == final
    assert "2 held-out prompts, 2 sampled completions of each" in summary["final_return"]


@pytest.mark.slow
def test_a_run_that_is_ended_early_leaves_its_model(folder, capsys):
    make_model("tiny", context=512)
    JUDGE.answers, JUDGE.calls = 1000, 0
    flags = "--reward my_rewards:interrupting --num-iterations 100 --num-prompts 2 --group-size 2 --num-samples 2"
    with pytest.raises(SystemExit):
        command(lambda: train(f"{flags} --learning-rate 1e-2 --checkpoint-every 0 --out out"))
    assert "saved in out, for good" in capsys.readouterr().err
    assert 0 < len(written("metrics.jsonl")) < 100 and has_learnt()


def test_a_model_is_asked_as_its_run_did(folder, capsys, monkeypatch):
    """By texts here, although the model has a chat template."""
    model, chat = load_model(make_model("run/model")), [{"role": "user", "content": "12"}]
    stops = model.complete(["12"], max_completion=3)[0][-1:]
    language_training.record_template(folder / "run", dataclasses.replace(make_task(model), stop_strings=(stops,)))
    monkeypatch.setattr("sys.stdin", io.StringIO('12\n\n{"prompt": "345"}\n'))
    for flags in ("-", "12 --json --prompt-kind chat"):
        ask.main(parse_flags(ask.Arguments, f"run {flags} --max-completion 3".split()))
    options = {"max_completion": 3, "stop_strings": [stops]}
    first, second = model.complete(["12", "345"], **options)
    answer = json.dumps({"prompt": "12", "answers": model.complete([chat], **options)}, ensure_ascii=False)
    assert capsys.readouterr().out == f"12\n{first}\n345\n{second}\n{answer}\n"


def test_a_collapse_is_not_sharpening():
    """Numbers of SmolLM2-135M: the larger of two numbers, and the sentiment of reviews."""

    def point(pass_1, pass_8, all_equal):
        return {"pass_at_k": {"1": [pass_1], "8": [pass_8]}, "all_equal": [all_equal], "length": [2.0]}

    before = point(0.384, 0.775, 0.3)
    assert diagnose([before, point(0.497, 0.500, 0.95)], 40).startswith("warning: the policy has collapsed: pass@8")
    sharp = [point(0.494, 0.725, 0.5), point(0.997, 1.0, 0.98)]
    assert diagnose(sharp, 40).startswith("The policy has sharpened: pass@8 went from 0.725 to 1.000")
    assert diagnose([before, point(0.45, 0.70, 0.9)], 40) is None  # within the noise of 40 prompts
    assert diagnose([before, point(0.6, 0.5, 0.4)], 40) is None  # samples still differ
    assert diagnose([before], 40) is None


def test_measurements_cost_at_most_a_fifth_of_the_run():
    """By default; one before and one after training remain."""

    def interval(flags):
        arguments = parse(flags)
        return measurement_interval(arguments, arguments.hyperparams.num_iterations, arguments.num_held_out)

    # 100 iterations of 64 completions: 1280 - 128 for 4 measurements of 32 * 9 completions.
    assert interval("") == 34
    assert interval("--num-iterations 1000") == 24 and interval("--num-iterations 5") == 5
    assert interval("--sample-every 7") == 7


def parse(flags):
    return lm.parse(f"--model m --prompts p --reward r:r {flags}".split())


def test_clip_widths_are_the_algorithms_own_and_a_given_budget_replaces_the_default_one():
    widths = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo --clip-low 0.01": (0.01, 0.04)}
    for flags, width in widths.items():
        hyperparams = parse(f"--algorithm {flags}").hyperparams
        assert (hyperparams.clip_low, hyperparams.clip_high) == width and hyperparams.learning_rate == 1e-5
    rates = [parse(f"--lora-rank 4 {flags}").hyperparams.learning_rate for flags in ("", "--learning-rate 1e-5")]
    assert rates == [3e-4, 1e-5], "adapters have a rate of their own"
    budget = operator.attrgetter("hyperparams.total_steps", "hyperparams.num_iterations")
    assert budget(parse("")) == (Hyperparams.total_steps, 100) and budget(parse("--num-iterations 7"))[1] == 7
    assert budget(parse("--total-steps 200")) == budget(parse("--total-steps=200")) == (200, None)
