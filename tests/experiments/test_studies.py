"""The studies, as small as they go; the whole of each is its results page."""

import collections
import dataclasses
import importlib
import json
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import claims_2511_03527, family, gigpo, groups_or_critic, grpo_vs_ppo, pretrained, published_cartpole
from experiments.harness import pretrained_tasks
from grpo_jax import Config, Hyperparams
from grpo_jax.commands import train
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.sweeps.runs import Run
from grpo_jax.training.progress import RunResult


def test_every_script_can_be_imported():
    for package, module in (("grpo_jax.commands", train), ("experiments", family)):
        for path in sorted(Path(module.__file__).parent.glob("*.py")):
            importlib.import_module(f"{package}.{path.stem}")


@pytest.mark.slow
def test_the_main_job_compares_grpo_and_ppo(tmp_path, capsys):
    environments = ("Catch-bsuite",)
    arguments = grpo_vs_ppo.Arguments(environments=environments, num_seeds=2, total_steps=9000, out=tmp_path / "out")
    grpo_vs_ppo.main(arguments)
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [run["algorithm"] for run in runs] == ["GRPO", "PPO"]
    assert all(max(run["environment_steps"]) <= run["hyperparams"]["total_steps"] == 9000 for run in runs)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {line["run"] for line in lines} == {"GRPO on Catch-bsuite", "PPO on Catch-bsuite"}
    assert "Catch-bsuite" in capsys.readouterr().out


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


@pytest.mark.slow
def test_the_published_comparison_runs(tmp_path, capsys):
    published_cartpole.main(published_cartpole.Arguments(num_episodes=20, num_seeds=2, out=tmp_path / "out"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [run["algorithm"][:3] for run in summary["runs"]] == ["(a)", "(b)", "(c)", "(c)", "(d)"]
    assert "417.8" in capsys.readouterr().out


@pytest.mark.slow
def test_the_family_runs(tmp_path, capsys):
    algorithms = ("pass_at_k", "gdpo")
    family.main(family.Arguments(algorithms=algorithms, num_seeds=2, total_steps=70_000, out=tmp_path / "out"))
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    sort = "experiments.family:SORT"  # whose reward has parts
    tasks = [("pass_at_k", "CartPole-v1"), ("grpo", sort), ("gdpo", sort)]
    assert [(run["algorithm"], run["environment"]) for run in runs] == tasks
    assert (tmp_path / "out" / "family.png").exists() and (tmp_path / "out" / "other_tasks.png").exists()
    assert "pass_at_k: learns slowly" in capsys.readouterr().out


@pytest.mark.slow
def test_the_study_of_equal_states_runs(tmp_path, capsys):
    gigpo.main(gigpo.Arguments(tasks=("CartPole-v1",), num_seeds=2, budget=0.4, out=tmp_path / "out"))
    entry = json.loads((tmp_path / "out" / "summary.json").read_text())["CartPole-v1"]
    assert entry["steps"] == 80_000 and all(len(entry[name]["per_seed"]) == 2 for name in gigpo.ALGORITHMS)
    assert (tmp_path / "out" / "gigpo.png").exists()
    assert "CartPole-v1" in capsys.readouterr().out


def played(kind, spread, num_steps=30):
    """The hidden number and the rewards of an episode of alternating actions."""
    from experiments.harness.hidden import HiddenCartPole

    environment = HiddenCartPole()
    params = environment.default_params.replace(max_steps_in_episode=num_steps, **{kind: spread})
    _, state = environment.reset_env(jax.random.key(6), params)
    step, rewards = jax.jit(environment.step_env), []
    for i in range(num_steps):
        _, state, reward, terminated, _ = step(jax.random.key(i), state, i % 2, params)
        rewards.append(float(reward))
        assert not terminated
    return float(state.hidden), rewards


def test_a_hidden_number_changes_the_rewards_as_it_says():
    hidden, scaled = played("scale", 2.0)
    np.testing.assert_allclose(scaled, np.exp(2 * hidden), rtol=1e-6)
    _, paid = played("bonus", 100.0)
    np.testing.assert_allclose(paid, [1.0] * 29 + [1 + 100 * hidden], rtol=1e-5)
    _, delayed = played("delay", np.log(64.0))
    period = int(64 ** ((hidden + 1) / 2))
    assert period > 1 and sum(delayed) == 30 and delayed[: 2 * period] == ([0.0] * (period - 1) + [float(period)]) * 2


def test_few_hidden_values_are_all_drawn_and_only_seen_if_observed():
    from experiments.harness.hidden import HiddenCartPole

    environment, keys = HiddenCartPole(observed=True), jax.random.split(jax.random.key(0), 100)
    params = environment.default_params.replace(num_values=5)
    observation, state = jax.jit(jax.vmap(environment.reset_env, (0, None)))(keys, params)
    np.testing.assert_array_equal(np.unique(state.hidden), [-1.0, -0.5, 0.0, 0.5, 1.0])
    np.testing.assert_array_equal(observation["hidden"][:, 0], state.hidden)
    observation, hidden = jax.jit(jax.vmap(HiddenCartPole().reset_env, (0, None)))(keys, params)
    assert observation.shape == (100, 4)
    np.testing.assert_array_equal(hidden.hidden, state.hidden)


@pytest.mark.slow
def test_groups_and_critics_are_compared_where_something_is_hidden(tmp_path):
    small = {"total_steps": 20_000, "num_seeds": 2, "tuning_seeds": 2, "out": tmp_path / "out"}
    rows = ("bonus ±10", "level 1/4 … 4", "tasks observed")
    for methods in (("PPO", "PPO, recurrent"), ("forked, 4",)):
        groups_or_critic.main(groups_or_critic.Arguments(rows=rows, methods=methods, **small))
    results = json.loads((tmp_path / "out" / "summary.json").read_text())
    seconds = results.pop(groups_or_critic.SECONDS)
    assert list(results) == list(rows) and list(seconds) == ["PPO", "PPO, recurrent", "forked, 4"]
    assert all(len(results[row][method]["per_seed"]) == 2 for row in results for method in ("PPO", "forked, 4"))
    assert [row for row in rows if "PPO, recurrent" in results[row]] == ["level 1/4 … 4"]
    assert all(len(entry["tuning"]) == 5 for entries in results.values() for entry in entries.values())
    assert (tmp_path / "out" / "groups_or_critic.png").exists()


def test_mixed_groups_start_from_unrelated_states_and_exact_ones_from_one():
    config = Config("CartPole-v1", **claims_2511_03527.METHODS["exact 4"])
    simulator = Simulator(config.env, config.policy, ())
    key, params = jax.random.key(0), jax.tree.map(lambda leaf: jnp.full(32, leaf), config.env.params)
    kept = jax.eval_shape(lambda: simulator.reset(params, key, 32))._replace(environment_params=params)
    for algorithm, num_starts in ((claims_2511_03527.EXACT, 8), (claims_2511_03527.MIXED, 32)):
        first = jax.jit(lambda begin=algorithm.start.begin: begin(simulator, kept, key, 4))()
        assert len(np.unique(first.observation, axis=0)) == num_starts


def test_discounted_scores_are_compared_within_a_group():
    reward = np.ones((3, 4), np.float32)
    valid = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 0, 1]], bool)
    # At a discount of 0.5 the returns are 1.75 and 1 in one group, 1.5 and 1.75 in the other.
    trajectory = types.SimpleNamespace(reward=jnp.array(reward), valid=jnp.array(valid))
    advantage = claims_2511_03527.discounted_outcome(trajectory, Hyperparams(discount=0.5), 2)
    np.testing.assert_allclose(advantage, np.where(valid, [1.0, -1.0, -1.0, 1.0], 0.0), atol=1e-4)


@pytest.mark.slow
def test_mixed_groups_are_trained_for_each_discount(tmp_path):
    arguments = claims_2511_03527.Arguments(
        environments=("CartPole-v1",), methods=("mixed 32",), total_steps=20_000, tuning_seeds=1, out=tmp_path / "out"
    )
    claims_2511_03527.main(arguments)
    results = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(results) == ["CartPole-v1 0.9", "CartPole-v1 0.99", "CartPole-v1 1"]
    assert all(len(entries["mixed 32"]["per_seed"]) == 3 for entries in results.values())
    assert (tmp_path / "out" / "claims_2511_03527.png").exists()


def test_held_out_prompts_are_new():
    """No adjective or subject, animal or food, pair of numbers, or noun is also trained on."""
    parts = {
        "sentiment": lambda review: {review.split()[-1], review.removeprefix("Review: ").rsplit(" ", 1)[0]},
        "rule": lambda question: {question},
        "larger": lambda question: {frozenset(re.findall(r"\d+", question))},
        "sentence": lambda question: set(re.findall('"(.*?)"', question)),
    }
    assert parts.keys() == pretrained_tasks.TASKS.keys()
    for name, make in pretrained_tasks.TASKS.items():
        task = make()
        asked = [list(map(question, rows)) for rows in (task.prompts, task.held_out)]
        assert all(len(set(questions)) == len(questions) for questions in asked) and len(asked[1]) == 40
        trained, new = (set.union(*map(parts[name], questions)) for questions in asked)
        assert not trained & new, name
        answers = collections.Counter(row.get("answer") for row in task.held_out)
        assert name not in ("sentiment", "rule") or set(answers.values()) == {20}
        if name == "larger":
            assert sum(max(pair) == pair[0] for pair in map(re.compile(r"\d+").findall, asked[1])) == 20


def question(row):
    """The last message or line of a prompt."""
    return row["messages"][-1]["content"] if "messages" in row else row["prompt"].splitlines()[-1]


def test_rewards_of_a_pretrained_model():
    def chats(*texts):
        return [[{"role": "assistant", "content": text}] for text in texts]

    three = chats(" positive\n", "Positive", "negative")
    assert pretrained_tasks.exact(three, ["positive"] * 3) == [1.0, 0.0, 0.0]
    texts = (
        "The dog sees two cats.",
        "A dog. A cat sat there.",
        "the dog sees a cat.",
        "A dog is a cat",
        "Dogs chase a bird now.",
    )
    nouns = [["dog", "cat"]] * 5
    assert pretrained_tasks.one_sentence(chats(*texts), nouns) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert pretrained_tasks.both_words(chats(*texts), nouns) == [1.0, 1.0, 1.0, 1.0, 0.5]


def test_the_seeds_of_a_pretrained_model_are_put_together(tmp_path):
    """Of the results on the page."""
    page = Path(pretrained.__file__).parent / "results" / "pretrained"
    results = pretrained.read_all(page)
    first, _, last = pretrained.merged(results["sentiment", "GRPO"])
    assert first["iteration"] == 0 and len(last["rewards"]["exact"]) == 3
    assert np.mean(first["greedy"]["exact"]) == 0.5 and np.mean(last["greedy"]["exact"]) == 1.0
    pretrained.show(results, tmp_path)
    assert (tmp_path / "table.md").read_text() == (page / "table.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in page.glob("*.png")}


@pytest.mark.slow
def test_a_pretrained_model_is_trained_cell_by_cell(tmp_path, capsys):
    arguments = pretrained.Arguments(num_iterations=1, num_seeds=1, smoke=True, out=tmp_path / "out")
    pretrained.main(arguments)
    first = (tmp_path / "out" / "sentiment_grpo_0.json").read_text()
    pretrained.main(dataclasses.replace(arguments, methods=("GRPO", "PPO"), tasks=("sentiment", "sentence")))
    assert (tmp_path / "out" / "sentiment_grpo_0.json").read_text() == first, "it is not run again"
    assert "| sentence | PPO | 1 | 1 |" in capsys.readouterr().out
