"""What cannot be, as a user would write it: one clear line, exit code 2, and nothing overwritten or lost."""

import dataclasses
import errno
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import make_model
from saved_policies import contents

from grpo_jax import TrainState
from grpo_jax.commands import lm, train
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.parsing import parse_flags, parse_known_flags
from grpo_jax.errors import ConfigError
from grpo_jax.recording.checkpoint import Checkpoints
from grpo_jax.recording.run_folder import describe_run
from grpo_jax.runs.progress import Chunk, initial_progress
from grpo_jax.runs.run_spec import RunSpec

TINY = (
    *("--environment", "Catch-bsuite", "--algorithm", "ppo", "--num-envs", "4", "--num-steps", "8"),
    *("--num-minibatches", "2", "--num-epochs", "1", "--hidden-sizes", "4", "--total-steps", "64"),
)
SAVED = ("--checkpoint-every", "2")


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A folder as a killed run leaves it, of a state that nobody needs to compute."""
    out, parsed = tmp_path_factory.mktemp("saved") / "out", train.parse(train.Arguments, TINY)
    keys = jax.random.split(jax.random.split(jax.random.key(0))[0], 1)
    plan = RunSpec("ppo", parsed.config, parsed.hyperparams, keys)
    with Checkpoints(out / "checkpoints" / plan.setting.folder, describe_run(plan)) as checkpoints:
        checkpoints.save(initial_progress({"params": jnp.ones((1, 4))}, 1)._replace(steps=np.array([32]), iteration=1))
    line = {"run": dataclasses.asdict(plan.setting), "iteration": 0, "environment_steps": [32]}
    (out / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return out


def refused(capsys, call):
    with pytest.raises(SystemExit) as stopped:
        command(call)
    news, found, said = capsys.readouterr().err.rpartition("error: ")
    assert stopped.value.code == 2
    assert found and said.count("\n") == 1 and news.count("\n") == news.startswith("tuned for ")
    return said


def start(*flags):
    train.main(train.parse(train.Arguments, [*TINY, *flags]))


COMMANDS = {
    "train --lr 1e-3": "--lr is --learning-rate here",
    "train --learning-rate -1": "learning_rate=-1.0 is negative",
    "train --sapo-tau-positive 2": "--sapo-tau-positive is no number of ppo: it is of sapo; leave it out",
    "train --kl-coef 0.5": "changed, but not read by ppo: kl_coef=0.5; leave it out",
    "train --num-seeds 0": "--num-seeds 0 is not a whole number from 1 to",
    "train --hidden-sizes": "--hidden-sizes has no value; write one or several",
    "train --evaluate-every 1 --evaluation-episodes 4294967296": "=4294967296 is more than",
    "train --checkpoint-every -1": "checkpoint_every=-1",
    "train --checkpoint-every 0 --resume --out x": "checkpoint_every=0 makes none",
    "train --resume": "name it with --out",
    "train --wandb offline": "pip install wandb",
    "play runs --out x.xyz": "x.xyz is not a name for an animation; use one",
    "train --out=": "--out has an empty path; write . for the current folder",
    "train --out \udcff": "is no text in UTF-8",
    "sweep --rows-at-once 0": "--rows-at-once 0 is not a whole number from 1",
    "evaluate runs --out .": "--out . is a folder; name a file in it, such as results.json",
    "evaluate runs --env-params gravity": "'gravity': there is no '='; write NAME=NUMBER",
    "evaluate runs --env-params gravity=1 gravity=2": "gravity has a value already",
    "play runs --fps nan": "--fps nan is not a number from 0.01 to 1000",
    "plot runs --out /proc/x": "--out /proc/x cannot be written",
    "list environmets": "did you mean 'environments'",
    "ask me": "there is no prompt, or an empty one; write it after the folder",
    "ask HuggingFaceTB/SmolLM2 hi": "`hf download HuggingFaceTB/SmolLM2 --local-dir SmolLM2`",
    "ask . hi": ". has no files; name the folder of a model",
    "lm": "there is no reward to learn from; name one, such as --reward my_rewards:reward",
    "lm --reward builtins:digit": "'builtins' has no 'digit'",
    "lm --algorithm grop": "unknown algorithm 'grop': did you mean 'grpo'",
    **{
        f"lm --reward grpo_jax.language:overlong {flags}": message
        for flags, message in {
            "--num-samples 0": "--num-samples 0 is not a whole number from 1",
            "--num-generations 4": "--num-generations is --group-size here",
            "--max-completion-length 4": "--max-completion-length is --max-completion here",
            "--loss-type dapo": "--loss-type is part of --algorithm (see: grpo-jax docs coming_from) here",
            "--algorithm SAC": "'SAC' learns from stored data; there are no such (off-policy) algorithms here",
            "--max-turns 4": "max_turns=4 (--max-turns) needs respond (--respond)",
            "--sample-every 0 --stop-at-reward 1": "--stop-at-reward is for measurements, of which --sample-every 0",
            "--merge-lora": "--merge-lora is for adapters, of which there are none without --lora-rank; leave it out",
            "--held-out x": "--held-out x is neither a file nor a share",
            "--max-completion 600": "the prompt has 7 tokens, and 607 with a completion",
            "--lora-rank 2147483647": "--lora-rank 2147483647 is more than the model's width of 16",
            "--num-prompts 2147483647": "num_envs=17179869176 is more than 2147483647",
            "--total-steps 100 --num-iterations 5": "total_steps=100 and num_iterations=5 are two budgets",
        }.items()
    },
}


def start_lm(*flags):
    (Path.cwd() / "prompts.jsonl").write_text('{"prompt": "1 + 2 ="}\n{"prompt": "1 + 3 ="}\n')
    make_model("tiny", context=512)
    lm.main(lm.parse(["--model", "tiny", "--prompts", "prompts.jsonl", "--held-out", "0.5", *flags]))


def start_any(name, *flags):
    if name in ("train", "lm"):
        return {"train": start, "lm": start_lm}[name](*flags)
    module = importlib.import_module(f"grpo_jax.commands.{name}")
    parsed = (parse_known_flags if name == "sweep" else parse_flags)(module.Arguments, flags)
    return module.main(*parsed) if name == "sweep" else module.main(parsed)


@pytest.mark.parametrize("line, message", COMMANDS.items(), ids=[repr(line[:40]) for line in COMMANDS])
def test_a_wrong_command_line_is_one_line(line, message, tmp_path, capsys, monkeypatch):
    """One or two of each source of errors; the tests of `Config` and `Hyperparams` have theirs."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, lambda: start_any(*line.split()))
    assert not {path.name for path in tmp_path.iterdir()} - {"tiny", "prompts.jsonl"}


def test_what_tyro_refuses_ends_with_its_message(capsys):
    for flags in ("--num-env 8", "--learning-rate fast", "--wandb sometimes", "--env-params gravity=inf"):
        with pytest.raises(SystemExit) as stopped:
            command(lambda flags=flags: start(*flags.split()))
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and flags.split()[0] in said and "Traceback" not in said


@pytest.mark.parametrize("name, flags", [("metrics.jsonl", ()), ("summary.json", (*SAVED, "--resume"))])
def test_a_folder_with_a_run_that_cannot_be_resumed(name, flags, tmp_path, capsys):
    (tmp_path / name).write_text("precious")
    said = refused(capsys, lambda: start(*flags, "--out", str(tmp_path)))
    assert "already holds a run" in said and "without checkpoints" in said
    assert contents(tmp_path) == {name: b"precious"}


DIFFERENT = {
    "no --resume": ("", "go on with it (resume=True, --resume)"),
    "environments": ("--resume --num-envs 8", "config.num_envs is 8 here, and 4 in the checkpoints"),
    "number of seeds": ("--resume --num-seeds 2", "there are 2 keys here, one for each row, and 1 in the checkpoints"),
    "algorithm": ("--resume --algorithm grpo --cut-episodes", "holds the run 'ppo_on_Catch-bsuite'"),
    "a state of another version": ("--resume", "state.params"),
}


@pytest.mark.parametrize("flags, message", DIFFERENT.values(), ids=DIFFERENT)
def test_resume_of_another_run(flags, message, saved_run, capsys):
    before = contents(saved_run)
    said = refused(capsys, lambda: start(*SAVED, *flags.split(), "--out", str(saved_run)))
    assert message in said and "another folder" in said
    assert contents(saved_run) == before


# --- failures after the folder is claimed ----------------------------------------------------------------------------


def failing(error):
    def fail(*arguments, **others):
        raise error

    return fail


EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9999 bytes")
FAILURES = {
    "memory": ("grpo_jax.runs.run.initial_states", failing(EXHAUSTED), "not enough memory for 1 row(s) ("),
    "checkpoints": ("grpo_jax.sweeps.study.record", failing(ConfigError("of another run")), "of another run"),
    "the first chunk": (
        "grpo_jax.recording.recorder.Rows",
        lambda *_, callback, **__: save_and_fail(callback),
        "not enough memory: 1",
    ),
}


STATES = TrainState(**dict.fromkeys(TrainState.__dataclass_fields__) | {"params": jnp.ones((1, 4))})


def save_and_fail(callback):
    callback(initial_progress(STATES, 1), None)
    raise MemoryError("not enough memory: 1")


@pytest.mark.parametrize("what, fails, message", FAILURES.values(), ids=FAILURES)
def test_a_failed_start_can_be_made_again(what, fails, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "notes.txt").write_text("precious")
    monkeypatch.setattr(what, fails)
    for more in ((), (), ("--resume",)):
        flags = (*SAVED, "--out", str(tmp_path), *more)
        assert message in refused(capsys, lambda flags=flags: start(*flags))
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_a_disk_that_is_full(tmp_path, capsys, monkeypatch):
    metrics = dict.fromkeys(["environment/steps", "episode/return_mean", "episode/count"], np.full((2, 1), 32.0))
    chunk = Chunk(metrics, steps=np.array([[32], [64]]), iteration=0, seconds=1)

    def run(*arguments, callback, **others):
        progress = initial_progress(STATES, 1)
        callback(progress, chunk)
        full = failing(OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr("grpo_jax.recording.metrics_logger.as_lines", full)
        callback(progress, chunk._replace(iteration=2))

    monkeypatch.setattr("grpo_jax.recording.recorder.Rows", run)
    said = refused(capsys, lambda: start("--out", str(tmp_path / "[red]")))
    assert "[Errno 28] No space left on device\n" in said
    assert len((tmp_path / "[red]" / "metrics.jsonl").read_text().splitlines()) == 2
