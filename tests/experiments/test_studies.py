"""The studies, each as small as it goes; the whole of each is its results page."""

import collections
import importlib
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import experiments
from experiments import published_cartpole
from experiments.harness import pretrained_tasks
from experiments.harness.countdown import countdown
from experiments.harness.hidden import HiddenCartPole
from grpo_jax.environments.tokens import PAD, text
from grpo_jax.runs.result import RunResult
from grpo_jax.sweeps.runs import Run

EXPERIMENTS = Path(experiments.__file__).parent
FEW = {"num_seeds": 2}
ONE_SUITE = {"environments": ("Catch-bsuite",), "steps_factor": 0.05, **FEW}
BRAX = {"task": "fast", "num_envs": 8, "num_steps": 8, "hidden_sizes": (8,), "iterations": 2, "repeats": 2}
TOKENS = {"sizes": ("2x16:4:20",), "num_envs": 16, "group_size": 2, "repeats": 1, "seconds": 0.0}
SMALLEST = {
    "brax_speed": BRAX,
    "entropy": {"total_steps": 20_000, **FEW},
    "estimators": {"num_groups": 40, "estimators": ("RLOO, fresh", "GAE, exact critic")},
    "family": {"algorithms": ("pass_at_k", "gdpo"), "total_steps": 70_000, **FEW},
    "gigpo": {"tasks": ("CartPole-v1",), "budget": 0.4, **FEW},
    "groups_or_critic": {"rows": ("bonus ±10",), "methods": ("PPO", "forked, 4"), "total_steps": 20_000, **FEW}
    | {"tuning_seeds": 2},
    "grpo_vs_ppo": {"environments": ("Catch-bsuite",), "total_steps": 9000, **FEW},
    "gymnax_suite": ONE_SUITE,
    "per_step_groups": {"tasks": ("Pendulum-v1",), "methods": ("PPO", "GR2PO, all"), "total_steps": 8000, **FEW},
    "pretrained": {"num_iterations": 1, "num_seeds": 1, "smoke": True, "methods": ("GRPO", "PPO")},
    "published_cartpole": {"num_episodes": 20, **FEW},
    "scale": {"environments": ("CartPole-v1",), "methods": ("PPO, cpu", "PPO, 4,096"), "steps_factor": 0.1, **FEW},
    "scoreboard": {"tasks": ("Catch-bsuite",), "implementations": ("plain PPO", "PPO, tuned"), "num_seeds": 1},
    "suites": {"environments": ("Catch-bsuite",), "steps_factor": 0.01, **FEW},
    "token_reversal": {"lengths": (3,), "num_prompts": 4, "num_iterations": 2, "width": 8, "num_seeds": 4},
    "token_speed": TOKENS,
}
A_FILE = {"brax_speed", "estimators", "token_speed"}
"""Studies that write one file."""


def test_every_study_can_be_imported():
    for path in sorted(EXPERIMENTS.glob("*.py")):
        importlib.import_module(f"experiments.{path.stem}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_study_runs_on_its_smallest_flags(name, tmp_path, monkeypatch):
    if name == "brax_speed":
        pytest.importorskip("brax")
    if name != "scoreboard":  # whose processes are modules of the clone
        monkeypatch.chdir(tmp_path)
    study = importlib.import_module(f"experiments.{name}")
    out = tmp_path / ("out.json" if name in A_FILE else "out")
    study.main(study.Arguments(**SMALLEST[name], out=out))
    written = [out] if name in A_FILE else [path for path in out.rglob("*") if path.is_file()]
    assert written and all(json.loads(path.read_text()) is not None for path in written if path.suffix == ".json")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written if path.suffix == ".png")


def test_the_last_episodes_are_weighted_by_iteration():
    counts = np.array([[4.0, 1.0], [4.0, 1.0], [2.0, 1.0], [0.0, np.nan]])
    returns = np.array([[1.0, 10.0], [2.0, 20.0], [5.0, 30.0], [np.nan, np.nan]])
    metrics = {"episode/count": counts, "episode/return_mean": returns}
    run = Run("", None, None, RunResult(None, metrics, None, 0.0, 0.0, None, None, None), np.zeros(2), 0.0, 0.0)
    # Seed 0: the last 2 episodes are those of one iteration, the last 3 reach into the one before.
    np.testing.assert_allclose(published_cartpole.last_episodes(run, 2), [5.0, 25.0])
    np.testing.assert_allclose(published_cartpole.last_episodes(run, 3), [(2 * 5 + 4 * 2) / 6, 20.0])


def played(kind, spread, num_steps=30):
    """The hidden number and the rewards of an episode of alternating actions."""
    environment = HiddenCartPole()
    params = environment.default_params.replace(max_steps_in_episode=num_steps, **{kind: spread})
    _, state = environment.reset_env(jax.random.key(6), params)
    step, rewards = jax.jit(environment.step_env), []
    for i in range(num_steps):
        _, state, reward, _, _ = step(jax.random.key(i), state, i % 2, params)
        rewards.append(float(reward))
    return float(state.hidden), rewards


def test_a_hidden_number_changes_the_rewards_as_it_says():
    hidden, scaled = played("scale", 2.0)
    np.testing.assert_allclose(scaled, np.exp(2 * hidden), rtol=1e-6)
    _, paid = played("bonus", 100.0)
    np.testing.assert_allclose(paid, [1.0] * 29 + [1 + 100 * hidden], rtol=1e-5)
    _, delayed = played("delay", np.log(64.0))
    period = int(64 ** ((hidden + 1) / 2))
    assert period > 1 and sum(delayed) == 30 and delayed[: 2 * period] == ([0.0] * (period - 1) + [float(period)]) * 2


def test_held_out_prompts_are_new():
    """No adjective or subject, animal or food, pair of numbers, or noun is also trained on."""
    parts = {
        "sentiment": lambda review: {review.split()[-1], review.removeprefix("Review: ").rsplit(" ", 1)[0]},
        **dict.fromkeys(("rule", "calculator"), lambda question: {question}),
        "larger": lambda question: {frozenset(re.findall(r"\d+", question))},
        "sentence": lambda question: set(re.findall('"(.*?)"', question)),
    }
    for name, make in pretrained_tasks.TASKS.items():
        task = make()
        asked = [list(map(question, rows)) for rows in (task.prompts, task.held_out)]
        assert all(len(set(questions)) == len(questions) for questions in asked) and len(asked[1]) == 40
        trained, new = (set.union(*map(parts[name], questions)) for questions in asked)
        assert not trained & new, name
        answers = collections.Counter(row.get("answer") for row in task.held_out)
        assert name not in ("sentiment", "rule") or set(answers.values()) == {20}


def question(row):
    """The last message or line of a prompt."""
    return row["messages"][-1]["content"] if "messages" in row else row["prompt"].splitlines()[-1]


def test_countdown_takes_every_right_expression():
    task = countdown(3)

    @jax.jit
    @jax.vmap
    def draw(key):
        problem = task.draw(key)
        return problem, task.prompt(problem), task.correct(problem, problem.solution)

    problems, prompts, solved = jax.device_get(draw(jax.random.split(jax.random.key(0), 50)))
    assert solved.all()
    for prompt, solution in zip(prompts, problems.solution, strict=True):
        (numbers, target), written = text(task, prompt).split(":"), text(task, solution)[:-1]
        assert eval(written) == int(target) and sorted(written[::2]) == list(numbers)
    problem = problems._replace(numbers=np.array([2, 3, 7]), target=13)
    right, legal = ["2*3+7$", "7+3*2$"], ["7*2-3$", "7+3+2$", "7+6$", "7$"]
    judge = jax.jit(lambda completion: (task.correct(problem, completion), task.well_formed(problem, completion)))
    for written in (*right, *legal, "2*3+7", "2*3+$", "*37$", "27$"):
        completion = np.array([*map(task.vocabulary.index, written), *[PAD] * (6 - len(written))])
        assert judge(completion) == (written in right, written in right + legal), written
