"""Reward functions: how they are called, and what is said of those that fail."""

import asyncio
import collections
import concurrent.futures
import decimal
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.errors import ConfigError
from grpo_jax.language import Reward, RewardError, load_reward, overlong
from grpo_jax.language.rewards import call_rewards, check_rewards, totals

PROMPTS, COMPLETIONS = ["a", "b", "c"], ["x", "yy", "zzz"]
IDS = [[1], [2, 2], [3, 3, 3]]


def of(values):
    return lambda completions: values


def in_a_loop(completions):
    for text in completions:
        1 / (len(text) - 2)  # noqa: B018


def scores(*functions, completions=COMPLETIONS, **fields):
    rewards = [Reward(f"part_{i}", function) for i, function in enumerate(functions)]
    arguments = {"prompts": PROMPTS, "completions": completions, "completion_ids": IDS, **fields}
    return totals(call_rewards(rewards, arguments))[0]


def test_functions_get_copies_of_the_arguments_that_they_name():
    def named(completions, answer):
        answer[0] = completions.pop()
        return [float(len(text) == number) for text, number in zip(COMPLETIONS, [1, 1, 3], strict=True)]

    def all_of_them(prompts, completions, **fields):
        assert (prompts, completions, fields) == (PROMPTS, COMPLETIONS, {"completion_ids": IDS, "answer": [1, 1, 3]})
        return np.array([1, 2, 3])

    values = scores(named, all_of_them, lambda completion_ids: map(len, completion_ids), answer=[1, 1, 3])
    assert values.tolist() == [[1, 1, 1], [0, 2, 2], [1, 3, 3]] and values.dtype == np.float32


def test_overlong_completions_are_punished_over_the_last_tokens():
    ids, reward = [[7] * length for length in (1, 80, 85, 99, 100)], load_reward("grpo_jax.language:overlong=0.5")
    np.testing.assert_allclose(reward.function(ids, [100] * 5), [0, 0, -0.25, -0.95, -1])
    np.testing.assert_allclose(overlong(ids, [100] * 5, buffer=50), [0, -0.6, -0.7, -0.98, -1])
    assert (reward.name, reward.weight) == ("overlong", 0.5)
    with pytest.raises(ConfigError, match="overlong has buffer=-1, the width of a ramp in tokens; use 0 or more"):
        overlong(ids, [4], buffer=-1)


def test_async_functions_run_at_the_same_time_in_one_event_loop():
    """Of all calls: in a thread, where a loop runs already, as in a notebook, and after an error."""
    limit, loops, started = asyncio.Semaphore(1), set(), []

    async def judge(completions):
        async def one(text):
            async with limit:
                loops.add(asyncio.get_running_loop())
                await asyncio.sleep(0)
                return len(text)

        return (length for length in await asyncio.gather(*map(one, completions)))

    async def together(completions):
        started.append(1)
        while len(started) < 2:
            await asyncio.sleep(0)
        return [0.5] * len(completions)

    async def notebook():
        return scores(judge).tolist()

    assert scores(together, lambda completions: [1, 1, 1], together).tolist() == [[0.5, 1, 0.5]] * 3
    results = [scores(judge).tolist(), asyncio.run(notebook())]
    with pytest.raises(RewardError, match="part_1"):
        scores(judge, async_failure)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        results += threads.map(lambda _: scores(judge).tolist(), range(3))
    assert results == [[[1], [2], [3]]] * 5 and len(loops) == 1


PAID = [
    *((1, 2, 3), range(1, 4), collections.deque([1, 2, 3]), {"a": 1, "b": 2, "c": 3}.values()),
    *([decimal.Decimal(1), 2, 3], [np.array(1), jnp.array(2.0), np.float16(3)], np.ma.array([1, 2, 3], mask=[0] * 3)),
    *(jnp.array([1, 2, 3], dtype) for dtype in ("int8", "float16", "bfloat16")),
    *([True, np.array([2, 3]).sum() - 3, 3], [1.0, [(1, 0.5), (2, 1.5)], [(3, 3)]]),
]


def test_what_is_a_list_of_numbers_is_taken():
    for values in PAID:
        assert scores(of(values)).ravel().tolist() == [1, 2, 3], values
    values = scores(of([None, 2, 3]), of(np.array([1, None, 0.5], object)))  # which does not apply, pays nothing
    assert values.tolist() == [[0, 1], [2, 0], [3, 0.5]]


class Series(np.ndarray):
    """As of pandas, sorted by value."""

    index = (2, 0, 1)


def ends_the_program(completions):
    sys.exit(0)


async def async_failure(completions):
    raise TimeoutError("no answer")


async def one_by_one(completions):
    async def one(text):
        raise ConnectionError("lost")

    return await asyncio.gather(one(completions[2]))


async def async_generator(completions):
    yield 1.0


LIST, NUMBER = "; return a list with one number for each of the 3", "; return a number up to .* for every completion"
FAILURES = [
    *((of([1.0]), f"'part_0' returned 1 values{LIST}"), (of(None), f"returned None{LIST}"), (of(1.0), "returned 1.0;")),
    *((of({0: 5.0, 1: 5.0, 2: 5.0}), f"returned {{0: 5.0, .*}}{LIST}"), (of({1, 2, 3}), "returned {1, 2, 3}")),
    *((of(memoryview(b"111")), f"returned <memory.*{LIST}"), (of("111"), f"returned '111'{LIST}")),
    *((of(np.ones((3, 1))), r"returned array\(\[\[1"), (of(np.ones(())), r"returned array\(1.\)")),
    *((of(np.arange(3).view(Series)), f"returned Series.*{LIST}"), (async_generator, f"returned <async_gen.*{LIST}")),
    (of(np.ma.array([1, 2, 3], mask=[0, 1, 0])), "returned masked for the completion 'yy'"),
    *((of([0, b"1", 0]), "returned b'1' for the completion 'yy'"), (of(["1", 0, 0]), "returned '1' for")),
    *(
        (of(np.array([1, 2, 3], "m8[s]")), "for the completion 'x'"),
        (of([0, np.ones(1), 0]), r"array\(\[1.\]\) for .*'yy'"),
    ),
    *((of([0, np.nan, 0]), f"returned nan for the completion 'yy'{NUMBER}"), (of([0, 0, -np.inf]), "-inf for .*'zzz'")),
    *((of([0, -1e16, 0]), "returned -1e[+]16 for"), (of([0, 10**400, 0]), "returned 10000.*0 for the completion 'yy'")),
    *((of(np.array([1j, 0, 0])), "returned np.complex128.* for"), (of(np.array(["1"] * 3)), "returned np.str_.* for")),
    (of([None, 0, 0]), "no reward applies to the completion 'x', as part_0 returned None"),
    (of([[1.0], 0, 0]), r"returned \[1.0\] for .* 'x'; .* or a list of \(position, number\)"),
    (of([0, [(3, 1)], 0]), "for .*'yy'; .* from 1 to 2"),
    (in_a_loop, r"ZeroDivisionError: .*test_rewards.py, line \d+, where text = 'yy'\); let it return a number"),
    (lambda completions: (1 / (len(text) - 2) for text in completions), "ZeroDivisionError: .*, where text = 'yy'"),
    (ends_the_program, "raised SystemExit: 0 .*test_rewards.py, line"),
    *((async_failure, "raised TimeoutError: no answer .*, line"), (one_by_one, "Connection.*where text = 'zzz'")),
]


def test_a_failure_names_the_reward_and_the_completion():
    for function, message in FAILURES:
        calls = []

        def counted(completions, function=function, calls=calls):
            calls.append(1)
            return function(completions)

        with pytest.raises(RewardError, match=message):
            scores(counted)
        assert len(calls) == 1, "a judge may cost money"


def test_a_failure_shows_the_text_of_a_chat():
    chats = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    with pytest.raises(RewardError, match="returned nan for the completion 'x'"):
        scores(of([np.nan] * 3), completions=chats)


def test_a_reward_is_loaded_by_its_path(monkeypatch):
    module = types.SimpleNamespace(brief=lambda completions: [-len(text) for text in completions], number=3)
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    assert load_reward("my_rewards:brief") == Reward("brief", module.brief, 1.0)
    assert load_reward("my_rewards:brief=-0.5").weight == -0.5
    for path, message in {
        "my_rewards:breif": "did you mean 'brief'",
        "my_rewards:number": "'my_rewards:number' is not a function",
        "my_rewards:brief=nan": "the weight 'nan' is not a number",
        "my_rewards:brief=high": "the weight 'high' is not a number; write my_rewards:brief=0.5",
        "no_such_module:reward": "cannot import 'no_such_module'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_reward(path)


def test_fields_are_checked_before_any_call():
    reward = Reward("exact", lambda completions, answer, scale=1.0: completions)
    check_rewards([reward, Reward("timed", lambda iteration: [])], ["answer"], "prompts.jsonl, line 1")
    for rewards, field, message in (
        ([reward], "target", "'exact' needs 'answer', but prompts.jsonl, line 1 has only the fields target"),
        ([Reward("max", max)], "answer", "the arguments of the reward 'max' are unknown: "),
        ([reward, reward], "answer", "must differ in their names"),
        ([], "answer", "there is no reward to learn from"),
        ([Reward("timed", lambda trainer_state: [])], "answer", "'timed' needs 'trainer_state', .* ask for iteration,"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_rewards(rewards, [field], "prompts.jsonl, line 1")
