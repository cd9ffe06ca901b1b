"""The recipe of reasoning models on arithmetic: its problems, demonstrations, rewards, and the whole at a tiny size."""

import json

import jax
import numpy as np
import pytest
from language_models import make_model

from grpo_jax import Hyperparams
from grpo_jax.commands.harness.arithmetic import accuracy, demonstrate, make_problems, right_steps, well_formed
from grpo_jax.commands.harness.held_out_points import before_and_after
from grpo_jax.commands.harness.study import RecordingArguments
from grpo_jax.errors import ConfigError
from grpo_jax.language import LanguageTask, Reward, as_prompts, demonstration_tokens, load_model, load_params

PROBLEM = {"prompt": "What is 8+9-5?", "answer": "12", "steps": ["8+9=17", "17-5=12"]}
RIGHT = "<think>8+9=17\n17-5=12</think><answer>12</answer>"


def test_problems_are_distinct_and_their_steps_lead_to_the_answer():
    problems = make_problems(300, num_terms=3, largest=9, seed=0)
    assert len({problem["prompt"] for problem in problems}) == 300
    for problem in problems:
        text = problem["prompt"].removeprefix("What is ").removesuffix("?")
        assert eval(text) == int(problem["answer"]) >= 0
        assert all(eval(step.replace("=", "==")) for step in problem["steps"])
        assert problem["steps"][-1].endswith(f"={problem['answer']}") and len(problem["steps"]) == 2
    others = make_problems(300, num_terms=3, largest=9, seed=1, excluded=[problem["prompt"] for problem in problems])
    assert not {problem["prompt"] for problem in problems} & {problem["prompt"] for problem in others}


def test_a_demonstration_gets_every_reward():
    assert demonstrate(PROBLEM) == {"prompt": PROBLEM["prompt"], "completion": RIGHT}
    assert accuracy([RIGHT], ["12"]) == well_formed([RIGHT]) == [1.0]
    ((first, second),) = right_steps([RIGHT], [PROBLEM["steps"]])
    assert [RIGHT[:end] for end, _ in (first, second)] == ["<think>8+9=17", "<think>8+9=17\n17-5=12"]
    assert first[1] == second[1] == 0.5


@pytest.mark.parametrize(
    "completion, rewards",
    [
        ("<think>8+9=17\n17-5=11</think><answer>11</answer>", (0, 1, 0.5)),
        ("<think>8+9=16\n17-5=12</think><answer>12</answer>", (1, 1, 0.5)),
        ("<think>8+9=17</think><answer> 12 </answer>", (1, 1, 0.5)),
        ("<think>8+9=17\n17-5=12\n12+0=12\n12+0=12</think><answer>12</answer>", (1, 1, 0.5)),
        ("<answer>12</answer>", (1, 0, 0)),
        (RIGHT + " and more", (1, 0, 1)),
        ("<think>8+9=17", (0, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_rewards(completion, rewards):
    (steps,) = right_steps([completion], [PROBLEM["steps"]])
    found = accuracy([completion], ["12"])[0], well_formed([completion])[0], sum(value for _, value in steps)
    assert found == rewards
    assert all(0 < end <= len(completion) for end, _ in steps)


def make_task(folder, **changes):
    rewards = (Reward("accuracy", accuracy),)
    model = load_model(make_model(folder))
    return LanguageTask(model=model, prompts=as_prompts([PROBLEM]), rewards=rewards, **changes)


def test_demonstrations_as_tokens(tmp_path):
    task = make_task(tmp_path, max_completion=8)
    demonstrations = as_prompts([{"prompt": "ab", "completion": "cde"}, {"prompt": "f", "completion": "g"}])
    prompts, completions = demonstration_tokens(task, demonstrations)
    end, encode = task.model.tokenizer.end_tokens[0], task.model.tokenizer.encode
    assert prompts.tolist() == [encode("ab"), [-1, *encode("f")]]
    assert completions.tolist() == [[*encode("cde"), end], [*encode("g"), end, -1, -1]]


def test_demonstrations_have_the_system_prompt_of_the_task(tmp_path):
    task = make_task(tmp_path, max_completion=8, system_prompt="Think.")
    prompts, _ = demonstration_tokens(task, as_prompts([{**PROBLEM, "completion": "12"}]))
    assert prompts.tolist() == task.tokens.tolist()
    assert "Think." in task.model.tokenizer.decode(prompts[0])


def test_wrong_demonstrations_are_named(tmp_path):
    task = make_task(tmp_path, max_completion=3)
    with pytest.raises(ConfigError, match="prompt 0 has no completion"):
        demonstration_tokens(task, as_prompts([{"prompt": "a"}]))
    with pytest.raises(ConfigError, match="prompt 1: the completion has 4 tokens .* max_completion=3"):
        rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "bcd"}]
        demonstration_tokens(task, as_prompts(rows))


def test_a_table_of_means_before_and_after():
    point = {"rewards": {"accuracy": [0.25]}, "greedy": {"accuracy": [0.5]}, "pass_at_k": {"1": [0.25], "2": [0.4]}}
    rows = before_and_after([point | {"length": [9.0]}, point | {"length": [8.0]}])
    assert rows[0] == ["accuracy, sampled", "0.250", "0.250"] and rows[-1] == ["tokens", "9.000", "8.000"]
    assert [row[0] for row in rows] == ["accuracy, sampled", "accuracy, greedy", "pass@2", "tokens"]


def test_more_problems_than_there_are():
    assert len(make_problems(3, num_terms=1, largest=3, seed=0)) == 3
    with pytest.raises(ConfigError, match="3 problems with num_terms=1 and largest=3 cannot be found beside 1 others"):
        make_problems(3, num_terms=1, largest=3, seed=0, excluded=["What is 2?"])


def test_a_failed_start_leaves_no_folder_of_its_own(tmp_path, monkeypatch):
    from grpo_jax.commands import reasoning

    def fail(*arguments):
        raise ConfigError("unknown algorithm")

    monkeypatch.setattr(reasoning, "make_random_model", lambda out, *_: out.mkdir(exist_ok=True))
    monkeypatch.setattr(reasoning, "make_task", fail)
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        with pytest.raises(ConfigError, match="unknown algorithm"):
            reasoning.main(reasoning.Arguments(out=tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.slow
def test_from_nothing_to_a_saved_model(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    from grpo_jax.commands import reasoning

    sizes = {"num_terms": 2, "largest": 3, "num_training": 10, "num_test": 2, "num_layers": 1, "width": 32}
    few = {"num_prompts": 4, "group_size": 4, "num_held_out": 2, "num_samples": 2}
    arguments = reasoning.Arguments(
        **sizes,
        **few,
        num_seeds=2,
        target=0.05,
        sample_every=1,
        hyperparams=Hyperparams(learning_rate=3e-4, kl_coef=0.001, num_iterations=2, discount=1.0, gae_lambda=1.0),
        recording=RecordingArguments(checkpoint_every=1),
        out=tmp_path / "run",
    )
    reasoning.main(arguments)
    out = arguments.out
    for seed in range(2):
        before, after = load_params(out / f"start_{seed}"), load_params(out / f"model_{seed}")
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)
        assert all(value > 0 for value in jax.tree.leaves(moved))
        model = load_model(out / f"model_{seed}")
        assert model.tokenizer.decode(model.tokenizer.encode(RIGHT)) == RIGHT
    points = json.loads((out / "held_out.json").read_text())
    assert [point["iteration"] for point in points] == [0, 1, 2]
    assert set(points[0]["rewards"]) == {"accuracy", "well_formed", "right_steps"}
    assert (out / "held_out.png").exists() and "accuracy, greedy" in (out / "held_out.md").read_text()
    assert "start_1" in capsys.readouterr().out
