"""Prompts from files of JSON lines."""

import json

import pytest

from grpo_jax.errors import ConfigError
from grpo_jax.language import as_prompts, read_prompts, split_held_out

CHAT = [{"role": "user", "content": "2 + 3?"}]


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_prompts_have_fields_and_line_numbers(tmp_path):
    """Only line feeds end a line; a chat is a list of messages."""
    path, text = write(tmp_path, {"prompt": "1 +", "answer": 1}, "", {"prompt": "2 +", "answer": None}), "a\u2028b\x85c"
    prompts = read_prompts(path)
    assert prompts.contents == ["1 +", "2 +"] and prompts.fields == {"answer": [1, None]}
    assert prompts.sources == [f"{path}, line 1", f"{path}, line 3"] and not prompts.are_chats
    path.write_bytes(f'\ufeff{{"prompt": "{text}"}}\r\n{{"prompt": "d"}}\r\n'.encode())
    assert read_prompts(path).contents == [text, "d"]
    for name in ("prompt", "messages"):
        prompts = read_prompts(write(tmp_path, {name: CHAT, "id": 7}))
        assert prompts.contents == [CHAT] and prompts.are_chats and prompts.fields == {"id": [7]}


EITHER = "is no object with either prompt or messages: "
WRONG = [
    *(([""], "is empty; write a line such as"), ([{"prompt": "a"}, "{prompt}"], "line 2 cannot be read: .*write obj")),
    *((["[" * 100_000], "line 1 cannot be read"), (["[1]"], f"line 1 {EITHER}")),
    *(
        ([{"prompt": "a"}, {"text": "b"}], f"line 2 {EITHER}"),
        ([{"prompt": "a", "messages": CHAT}], f"line 1 {EITHER}"),
    ),
    *(([{"messages": each}], "line 1: a prompt is a text, or a list of mes") for each in ("a", [], [{"content": "a"}])),
    ([{"prompt": "a", "answer": 1}, {"prompt": "b"}], "line 2 lacks the field 'answer', unlike"),
    ([{"prompt": "a"}, {"prompt": "b", "answer": 1}], "line 2 has the field 'answer', unlike .*1;"),
    ([{"prompt": "a"}, {"messages": CHAT}], "line 2: some prompts are texts and others messages"),
    ([{"prompt": "a", "completions": 1}], "line 1: the field 'completions' has the name of an argument"),
]


def test_a_wrong_line_is_named(tmp_path):
    for lines, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            read_prompts(write(tmp_path, *lines))
    with pytest.raises(ConfigError, match="there are no prompts in .*; give a list of one or more"):
        as_prompts([])
    with pytest.raises(ConfigError, match="nowhere.jsonl cannot be read"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_a_share_is_held_out_by_the_hash_of_the_prompt():
    prompts = as_prompts([{"prompt": f"{number % 50}", "answer": number} for number in range(100)])
    training, held_out = split_held_out(prompts, 0.1)
    assert len(held_out.contents) == 10 and len(training.contents) == 90
    assert not set(training.contents) & set(held_out.contents), "equal prompts are on one side"
    assert [int(content) for content in held_out.contents] == [answer % 50 for answer in held_out.fields["answer"]]
    reversed_rows = prompts.select(range(99, -1, -1))
    assert set(split_held_out(reversed_rows, 0.1)[1].contents) == set(held_out.contents)
    assert [len(side.contents) for side in split_held_out(prompts.select([0, 1]), 0.01)] == [1, 1]
    for share, message in ((1.5, "is not a share of the prompts"), (0.5, "one prompt cannot be split")):
        with pytest.raises(ConfigError, match=message):
            split_held_out(as_prompts([{"prompt": "a"}, {"prompt": "a"}]), share)
