"""The experiments end to end, as small as they go: what they write, and what they refuse."""

import dataclasses
import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import family, grpo_vs_ppo, gymnax_suite, published_cartpole, suites
from experiments.harness.suite_study import run_suite, write_comparison
from experiments.harness.summaries import read_results
from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import name_of
from grpo_jax.commands import tokens, train
from grpo_jax.commands.harness import token_runs
from grpo_jax.commands.harness.figures import solved_after
from grpo_jax.commands.harness.runs import Run, make_plan, summarise
from grpo_jax.commands.harness.settings import ENVIRONMENT_SETTINGS, settings
from grpo_jax.commands.harness.study import RecordingArguments
from grpo_jax.errors import ConfigError
from grpo_jax.policies import Architecture
from grpo_jax.recording.files import write_json
from grpo_jax.training.progress import RunResult, initial_progress


def summary_of(directory: Path) -> dict:
    assert {path.name for path in directory.iterdir()} >= {"summary.json", "metrics.jsonl", "learning_curves.png"}
    assert (directory / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((directory / "summary.json").read_text())


def test_every_script_can_be_imported():
    for package, module in (("grpo_jax.commands", train), ("experiments", family)):
        for path in sorted(Path(module.__file__).parent.glob("*.py")):
            importlib.import_module(f"{package}.{path.stem}")


def test_the_main_job_writes_its_results(tmp_path, capsys):
    grpo_vs_ppo.main(
        grpo_vs_ppo.Arguments(environments=("Catch-bsuite",), num_seeds=2, total_steps=9000, out=tmp_path / "out")
    )
    summary = summary_of(tmp_path / "out")
    assert [run["algorithm"] for run in summary["runs"]] == ["GRPO", "PPO"]
    for run in summary["runs"]:
        assert run["environment"] == "Catch-bsuite"
        assert run["num_seeds"] == len(run["final_return"]["per_seed"]) == len(run["environment_steps"]) == 2
        assert max(run["environment_steps"]) <= 9000
        low, high = run["final_return"]["ci95"]
        assert -1 <= low <= run["final_return"]["iqm"] <= high <= 1
        assert run["hyperparams"]["total_steps"] == 9000
        assert run["steps_per_second"] > 0 and run["wall_seconds"] > run["compile_seconds"] > 0
    assert {"jax", "gymnax", "python"} <= summary["versions"].keys() and summary["hardware"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {line["run"] for line in lines} == {"GRPO on Catch-bsuite", "PPO on Catch-bsuite"}
    assert len(lines[0]["episode/return_mean"]) == 2
    printed = capsys.readouterr().out
    assert "Catch-bsuite" in printed and "final return" in printed

    # A mistake is found before the folder is made.
    with pytest.raises(ValueError, match="does not allow one iteration"):
        grpo_vs_ppo.main(grpo_vs_ppo.Arguments(total_steps=100, out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    with pytest.raises(FileExistsError, match="--out"):
        grpo_vs_ppo.main(grpo_vs_ppo.Arguments(num_seeds=2, out=tmp_path / "out"))


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300
    )


def test_train_has_every_field_as_a_flag_with_help():
    done = run_command("grpo_jax.commands.train", "--help")
    assert done.returncode == 0
    fields = [*Config.__dataclass_fields__, *Architecture.__dataclass_fields__, *Hyperparams.__dataclass_fields__]
    for field in {*fields, "num_seeds", "seed", "out", "render"} - {"transformer"}:
        assert f"--{field.replace('_', '-')}" in done.stdout, field
    assert "Parallel environments." in done.stdout and "0.0025" in done.stdout
    assert done.stdout.startswith("usage: grpo-jax train ")


def test_a_mistake_is_one_line_and_exit_code_2():
    """All others, and that nothing is lost: tests/commands/test_refusals.py."""
    done = run_command("grpo_jax.commands.train", "--num-envs", "10", "--group-size", "4")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "use num_envs=8 or 12" in done.stderr


def test_tuned_settings_are_defaults_however_flags_are_written():
    def config(*flags):
        return train.parse(train.Arguments, list(flags)).config

    for flags in (["--algorithm", "dapo"], ["--algorithm=DAPO"], ["--algorithm", "ppo", "--algorithm=dapo"]):
        tuned = train.parse(train.Arguments, flags)
        assert (tuned.config.num_envs, tuned.config.num_minibatches, tuned.hyperparams.clip_high) == (128, 16, 0.28)
    assert config().group_size == 16 and config("--num_envs", "8").group_size == 8, "chosen once the flags are known"
    assert config("--num-envs=8").num_minibatches == 16
    overridden = config("--env-params", "max_steps_in_episode=50", "gravity=1")
    assert overridden.env.max_steps == 50 and dict(overridden.env_params)["gravity"] == 1.0
    # Parameters of the environment are merged one by one.
    for environment in (["--environment", "MemoryChain-bsuite"], ["--environment=MemoryChain-bsuite"]):
        for override in (["--env-params", "memory_length=3"], ["--env_params", "memory_length=3"]):
            merged = config(*environment, *override)
            assert dict(merged.env_params) == {"memory_length": 3, "max_steps_in_episode": 12}
    assert config("--environment", "Catch-bsuite").env.max_steps == 9


@pytest.mark.slow
def test_a_flag_for_one_budget_replaces_the_other(tmp_path):
    def budget(fields, *flags):
        file = tmp_path / "fields.json"
        file.write_text(json.dumps(fields))
        hyperparams = train.parse(train.Settings, ["--config", str(file), *flags]).hyperparams
        return hyperparams.total_steps, hyperparams.num_iterations

    assert budget({"total_steps": 9e4}, "--num-iterations", "7") == (Hyperparams.total_steps, 7)
    assert budget({"num_iterations": 7}, "--total-steps", "9e4") == (9e4, None)
    assert budget({"num_iterations": 7}) == (Hyperparams.total_steps, 7)


def test_auto_is_resolved_before_the_tuned_settings(tmp_path, capsys):
    def parse(*flags):
        config = train.parse(train.Arguments, ["--algorithm", "auto", *flags]).config
        return name_of(config.algorithm), config.num_envs

    assert parse() == ("grpo", 128)
    assert capsys.readouterr().out == "--algorithm auto is grpo: whole episodes are cheap: at most 500 steps\n"
    assert parse("--total-steps", "100000") == ("ppo", 32), "tuned for PPO"
    short = "--environment", "Freeway-MinAtar", "--env-params", "max_steps_in_episode=100"
    assert parse(*short) == ("grpo", 16)
    file = tmp_path / "fields.json"
    fields = {"algorithm": "auto", "environment": "CartPole-v1", "total_steps": 1e5, "num_envs": 8}
    file.write_text(json.dumps(fields | {"num_minibatches": 1}))
    config = train.parse(train.Arguments, ["--config", str(file)]).config
    assert name_of(config.algorithm) == "ppo", "the budget allows fewer than 500 episodes"
    assert parse("--config", str(file), "--total-steps", "1e6") == ("grpo", 8)
    assert parse("--config", str(file), "--total-steps", "1e6", "--environment", "Freeway-MinAtar") == ("ppo", 8)


@pytest.mark.parametrize(
    "override, message", [("gravity", "there is no '='"), ("gravity=low", "'low' is not a number")]
)
def test_an_invalid_override_is_reported(override, message):
    with pytest.raises(ConfigError, match=message):
        train.parse(train.Arguments, ["--env-params", override])


@pytest.mark.slow
def test_train_runs_and_draws(tmp_path):
    arguments = train.Arguments(
        config=Config(
            environment="Catch-bsuite", algorithm="ppo", num_envs=4, num_steps=16, num_minibatches=2, hidden_sizes=(8,)
        ),
        hyperparams=Hyperparams(total_steps=200.0),
        out=tmp_path / "out",
        render=tmp_path / "episode.gif",
    )
    train.main(arguments)
    run = summary_of(tmp_path / "out")["runs"][0]
    assert run["algorithm"] == "ppo" and run["environment_steps"] == [192]
    assert run["config"]["hidden_sizes"] == [8]
    assert (tmp_path / "episode.gif").read_bytes().startswith(b"GIF8")


def test_what_cannot_be_drawn_is_refused_before_training(tmp_path):
    arguments = train.Arguments(
        config=Config(environment="DiscountingChain-bsuite"),
        hyperparams=Hyperparams(),
        out=tmp_path / "out",
        render=tmp_path / "episode.gif",
    )
    with pytest.raises(ValueError, match="no drawing of 'DiscountingChain-bsuite'"):
        train.main(arguments)
    assert not (tmp_path / "out").exists()


def test_the_last_episodes_are_weighted_by_iteration():
    counts = np.array([[4.0, 1.0], [4.0, 1.0], [2.0, 1.0], [0.0, np.nan]])
    returns = np.array([[1.0, 10.0], [2.0, 20.0], [5.0, 30.0], [np.nan, np.nan]])
    result = RunResult(
        None, {"episode/count": counts, "episode/return_mean": returns}, None, 0.0, 0.0, None, None, None
    )
    run = Run("", None, None, result, np.zeros(2), 0.0, 0.0)
    # Seed 0: the last 2 episodes are those of one iteration, the last 3 reach into the one before.
    np.testing.assert_allclose(published_cartpole.last_episodes(run, 2), [5.0, 25.0])
    np.testing.assert_allclose(published_cartpole.last_episodes(run, 3), [(2 * 5 + 4 * 2) / 6, 20.0])


def test_runs_are_written_as_strict_json(tmp_path):
    config = Config(environment="Catch-bsuite", algorithm="ppo", num_envs=4, num_steps=16, num_minibatches=2)
    config = dataclasses.replace(config, schedule=functools.partial(jnp.power, 0.5))
    names = ("episode/count", "episode/return_mean", "optim/skipped_updates")
    steps = 64 * np.arange(1, 101)[:, None]
    result = RunResult(
        None,
        {name: np.full((100, 1), 1.0) for name in names},
        steps,
        1.0,
        1.0,
        None,
        np.array(["max_episodes"]),
        np.ones(1),
    )
    run = Run("ppo", config, Hyperparams(total_steps=np.inf), result, np.ones(1), 2.0, 1.0)
    write_json(tmp_path / "summary.json", summarise(run))
    summary = (tmp_path / "summary.json").read_text()
    assert json.loads(summary)["hyperparams"]["total_steps"] == "inf" and "Infinity" not in summary
    assert json.loads(summary)["ended_by"] == ["max_episodes"] and json.loads(summary)["budget_used"] == [1.0]
    assert json.loads(summary)["config"]["schedule"] == {"partial": "power", "arguments": [0.5], "options": {}}
    assert solved_after(run) == 128, "of two iterations, 2% of those made"


@pytest.mark.slow
def test_the_published_comparison_runs(tmp_path, capsys):
    published_cartpole.main(published_cartpole.Arguments(num_episodes=20, num_seeds=2, out=tmp_path / "out"))
    summary = summary_of(tmp_path / "out")
    assert [run["algorithm"][:3] for run in summary["runs"]] == ["(a)", "(b)", "(c)", "(c)", "(d)"]
    assert "417.8" in capsys.readouterr().out


@pytest.mark.slow
def test_the_family_runs(tmp_path, capsys):
    family.main(
        family.Arguments(algorithms=("grpo", "grpo_process"), num_seeds=2, total_steps=130_000, out=tmp_path / "out")
    )
    assert len(summary_of(tmp_path / "out")["runs"]) == 2
    assert (tmp_path / "out" / "family.png").exists()
    assert "grpo_process: cannot learn" in capsys.readouterr().out


def suite_entry(ppo, grpo, algorithm="grpo", labels=("PPO", "GRPO")):
    curve = {"steps": [10, 20], "mean": [0.0, 1.0], "low": [0.0, 0.5], "high": [0.0, 1.5]}
    runs = dict(zip(labels, ((ppo, "ppo"), (grpo, algorithm)), strict=True))
    return {"steps": 1000, "random": 0.25, "num_seeds": 5, "hardware": "", "runs": {
        label: {"algorithm": name, "iqm": value, "ci95": [value - 1, value + 1], "core_seconds": 7.0,
                "steps_per_second": 2000.0, "curve": curve}
        for label, (value, name) in runs.items()
    }}  # fmt: skip


def test_the_suites_table_says_which_goals_are_missed(tmp_path):
    results = {
        "Pendulum-v1": suite_entry(-240.0, -500.0, "grpo_return_to_go"),
        "Acrobot-v1": suite_entry(-95.0, -91.0),
        "Swimmer-misc": suite_entry(3.0, 4.0),
    }
    write_comparison(results, tmp_path, gymnax_suite.HEADER, gymnax_suite.cells)
    assert json.loads((tmp_path / "summary.json").read_text()) == results
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    assert lines[0][2:] == [
        "-240 [-241, -239]",
        "",
        "-500 [-501, -499] `grpo_return_to_go`",
        "0.25",
        "-130",
        "-250",
        "7 s",
    ]
    assert [line[-2] for line in lines] == ["-250", "-90 (missed)", ""]
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_of_a_suite_runs_beside_the_results_of_the_others(tmp_path, capsys):
    environment, header, cells = "Catch-bsuite", gymnax_suite.HEADER, gymnax_suite.cells

    def plan(name):
        labels = {"PPO": "ppo", "LSTD": "lstd_gae"}
        sizes = dict(num_envs=4, num_steps=16, num_minibatches=2, hidden_sizes=(4,), total_steps=128)
        return [
            make_plan(name, algorithm, arguments.training_keys, label=label, **sizes)
            for label, algorithm in labels.items()
        ]

    earlier = suite_entry(1.0, 2.0) | {"steps": 128, "num_seeds": 2}
    write_comparison({environment: earlier}, tmp_path, header, cells)
    arguments = gymnax_suite.Arguments(methods=("LSTD",), num_seeds=2, out=tmp_path)
    run_suite("gymnax_suite", arguments, [environment], plan, header, cells)
    entry = read_results(tmp_path)[environment]
    assert list(entry["runs"]) == ["PPO", "GRPO", "LSTD"] and entry["random"] == 0.25
    assert entry["runs"]["PPO"] == earlier["runs"]["PPO"] and entry["runs"]["LSTD"]["algorithm"] == "lstd_gae"
    run_suite("gymnax_suite", arguments, [environment], plan, header, cells)
    assert read_results(tmp_path)[environment] == entry, "the folder has all of it"
    for changed, message in (
        ({"num_seeds": 3}, "128 steps and 2 seeds .* of 128 and 3"),
        ({"methods": ("LSTM",)}, "unknown method 'LSTM'.*LSTD"),
    ):
        changed = dataclasses.replace(arguments, environments=(environment,), **changed)
        with pytest.raises(ConfigError, match=message):
            run_suite("gymnax_suite", changed, [environment], plan, header, cells)
    with pytest.raises(ConfigError, match="unknown method 'LSTM'"):  # nor are environments left out for it
        run_suite("gymnax_suite", dataclasses.replace(arguments, methods=("LSTM",)), [environment], plan, header, cells)


def test_methods_of_a_suite_one_after_another_in_an_empty_folder(tmp_path, capsys):
    environment, header, cells = "Catch-bsuite", gymnax_suite.HEADER, gymnax_suite.cells

    def plan(name):
        fields = dict(num_envs=4, num_minibatches=2, hidden_sizes=(4,), total_steps=128)
        return [
            make_plan(name, "lstd_gae", arguments.training_keys, label="LSTD", num_steps=4, **fields),
            make_plan(name, "grpo", arguments.training_keys, label="GRPO", **fields),
        ]

    for method, whole_episodes in (("LSTD", False), ("GRPO", True)):
        arguments = gymnax_suite.Arguments(
            methods=(method,), num_seeds=2, recording=RecordingArguments(checkpoint_every=100), out=tmp_path
        )
        run_suite("gymnax_suite", arguments, [environment], plan, header, cells)
        row = (tmp_path / "table.md").read_text().splitlines()[2].split(" | ")
        assert bool(row[header.index("random") + 1]) == whole_episodes, "only those show what a random policy earns"
    assert list(read_results(tmp_path)[environment]["runs"]) == ["LSTD", "GRPO"]


def test_the_table_of_other_suites_has_published_figures(tmp_path):
    entry = suite_entry(800.0, 300.0, "kernel_gae", labels=("PPO", "critic-free"))
    write_comparison({"brax:hopper": entry}, tmp_path, suites.HEADER, suites.cells)
    assert (tmp_path / "table.md").read_text().splitlines()[2] == (
        "| brax:hopper | 1,000 | 800 [799, 801] | 300 [299, 301] `kernel_gae` "
        f"| {suites.SUITE['brax:hopper'].published} | 2,000 | 7 s |"
    )


def test_a_comparison_in_which_nothing_is_installed_is_an_error(tmp_path, capsys):
    def plan(environment):
        raise ConfigError(f"{environment} needs a package")

    with pytest.raises(ConfigError, match="none of the environments can be made"):
        run_suite("suites", suites.Arguments(out=tmp_path / "new"), ["some:task"], plan, suites.HEADER, suites.cells)
    assert capsys.readouterr().out == "left out: some:task needs a package\n"


def test_settings_are_by_suite_and_exceptions_by_environment(monkeypatch):
    exception = {"any": {"discount": 0.9}, "ppo": {"num_envs": 48}}
    monkeypatch.setitem(ENVIRONMENT_SETTINGS, "brax:walker", exception)
    common, special = settings("brax:runner", "kernel_gae"), settings("brax:walker", "kernel_gae")
    assert common["normalize_observations"] and common["num_steps"] == 64 and common["group_size"] == 8
    assert special == common | {"discount": 0.9, "num_envs": 48}
    assert "num_steps" not in settings("brax:runner", "grpo"), "one-episode groups play to the limit"


@pytest.mark.slow
def test_the_suite_adds_an_environment_to_its_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for environment in ("SimpleBandit-bsuite", "Catch-bsuite"):
        arguments = gymnax_suite.Arguments(
            environments=(environment,), num_seeds=2, steps_factor=0.1, out=tmp_path / "out"
        )
        gymnax_suite.main(arguments)
    results = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(results) == ["Catch-bsuite", "SimpleBandit-bsuite"]  # in the table's order
    assert -1.0 < results["Catch-bsuite"]["random"] < -0.5
    assert results["SimpleBandit-bsuite"]["runs"]["PPO"]["algorithm"] == "ppo"
    assert "Catch-bsuite" in capsys.readouterr().out


def test_accuracies_go_on_where_a_checkpoint_was(tmp_path, monkeypatch):
    """Of 20 points of a run to 4000 tokens, one each 200: killed after 700, resumed from a checkpoint at 500."""
    plan = SimpleNamespace(
        label="grpo", config=SimpleNamespace(steps_per_iteration=100), hyperparams=SimpleNamespace(total_steps=4000)
    )

    def answers(config, params, key, *, greedy=False, **others):
        return SimpleNamespace(**dict.fromkeys(("correct", "well_formed"), jnp.full((4, 8), params)))

    monkeypatch.setattr(token_runs, "answer", answers)

    def watched(out, *steps):
        accuracies = token_runs.AccuracyCurves(out, jax.random.key(0))
        for step in steps:
            states = SimpleNamespace(params=jnp.array([step / 4000, 0.0]))
            ended_by = np.full(2, "total_steps" if step == 4000 else "")
            progress = initial_progress(states, 2)._replace(steps=np.array([step, step // 2]), ended_by=ended_by)
            accuracies(plan, progress, None)
        return (out / "accuracy.json").read_text()

    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = watched(tmp_path / "whole", *range(0, 4100, 100))
    assert [point["steps"][0] for point in json.loads(whole)["grpo"]] == list(range(0, 4001, 200))
    watched(tmp_path / "killed", *range(0, 800, 100))
    assert watched(tmp_path / "killed", *range(500, 4100, 100)) == whole
    assert watched(tmp_path / "killed", 4000) == whole


@pytest.mark.slow
def test_token_tasks_are_warmed_up_trained_and_shown(tmp_path, capsys):
    kept = tmp_path / "start.msgpack"
    out = tmp_path / "out"
    arguments = tokens.Arguments(
        task="sort-2",
        num_seeds=2,
        total_steps=3200,
        target=0.05,
        warm_start=kept,
        out=out,
        recording=RecordingArguments(checkpoint_every=1),
    )
    tokens.main(arguments)
    run = summary_of(out)["runs"][0]
    assert run["environment"] == "tokens:sort-2" and all(0 <= score <= 1 for score in run["final_return"]["per_seed"])
    curve = json.loads((out / "accuracy.json").read_text())["grpo"]
    assert [len(point["sampled"]) for point in curve] == [2] * 3 and curve[0]["steps"] == [0, 0]
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "after the warm start" in printed and "after training" in printed and "exact match" in printed

    before = kept.read_bytes()
    assert (out / "warm_start.msgpack").read_bytes() == before
    with pytest.raises(ConfigError, match="target is 0.5 here, and 0.05 in the warm start"):
        tokens.main(dataclasses.replace(arguments, target=0.5, out=tmp_path / "other"))
    tokens.main(dataclasses.replace(arguments, recording=RecordingArguments(checkpoint_every=1, resume=True)))
    assert kept.read_bytes() == before
    assert json.loads((out / "accuracy.json").read_text())["grpo"] == curve


@pytest.mark.slow
@pytest.mark.parametrize("plans", [tokens.comparison, tokens.reward_hacking, tokens.keeping_variety])
def test_comparisons_are_of_equal_samples(plans):
    made = plans(tokens.Arguments())
    assert len({plan.label for plan in made}) == len(made) >= 5
    assert len({plan.config.steps_per_iteration for plan in made}) == 1
    assert len({float(plan.hyperparams.total_steps) for plan in made}) == 1
    assert not any(plan.config.algorithm.start.auto_reset for plan in made)
