"""Texts, chats and files of prompts, read as the tokenizer and the template of a published folder say."""

import datetime
import functools
import itertools
import json

import numpy as np
import pytest
from language_models import CHATML, make_model, make_params, make_task, make_tokenizer

from grpo_jax.commands.harness import language_flags, language_training
from grpo_jax.errors import ConfigError
from grpo_jax.language import (
    Reward,
    Tokenizer,
    as_prompts,
    chat,
    encode_prompts,
    load_model,
    load_tokenizer,
    read_prompts,
    save_model,
    split_held_out,
)
from grpo_jax.policies import Transformer

tokenizers = pytest.importorskip("tokenizers")
USER = [{"role": "user", "content": "1"}]


def metaspace():
    """Of Llama 2's kind: "▁" for spaces, also before a text; other letters as their bytes."""
    names = ["<unk>", "</s>", "<s>", "▁", *"23=+a", "▁5", "5", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = tokenizers.models.BPE(vocabulary, [("▁", "5")], unk_token="<unk>", byte_fallback=True)
    made, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<s>", "</s>"])
    return made


def with_template(single, made):
    special = [(name, made.token_to_id(name)) for name in single.split() if name != "$A"]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
    return made


def test_truncation_padding_and_dropout_are_left_out():
    made, text = make_tokenizer(), "12 + 3 = 15"
    plain = made.encode(text).ids
    made.enable_truncation(max_length=5)
    made.enable_padding(length=20, pad_id=0)
    made.model.dropout = 0.5
    tokenizer = Tokenizer(made, [0])
    assert tokenizer.encode(text) == plain
    assert len(made.encode(text).ids) != len(plain), "the argument stays as it is"


def test_what_a_tokenizer_appends_ends_no_prompt():
    for single, text, prompt in (
        *(("$A </s>", "a", [3, 8]), ("<s> $A </s>", "a", [2, 3, 8]), ("<s> $A", "a", [2, 3, 8])),
        *(("<s> $A </s>", "", [2]), ("$A <unk>", "a", [3, 8]), ("<s> $A </s>", "a</s>", [2, 3, 8, 1])),
    ):
        assert Tokenizer(with_template(single, metaspace()), [1]).encode(text) == prompt


TEXTS = ("2 + 3 =", " 5"), ("2 + 3 = ", "5"), ("a", "a a 5"), ("", "a"), ("日", "本"), ("é", "5é"), ("a ", "  5 ")


def test_a_prompt_and_its_completion_are_the_text_of_their_tokens():
    """Also of completions that are cut within a letter."""
    made = with_template("<s> $A", metaspace()), make_tokenizer()
    for tokenizer, (prompt, rest) in itertools.product((Tokenizer(each, [0]) for each in made), TEXTS):
        before, line, whole = map(tokenizer.encode, (prompt, "\n", f"\n{rest}"))
        tokens = whole[len(line) :]  # as at the beginning of a text some tokenizers add a space
        assert prompt + tokenizer.decode(tokens, before) == tokenizer.decode([*before, *tokens]) == prompt + rest
        assert tokenizer.decode(np.array([*tokens, -1]), np.array([-1, *before])) == rest
        for end in range(1, len(tokens) + 1):
            text = tokenizer.decode(tokens[:end], before)
            assert rest.startswith(text.rstrip("\ufffd")) and text.count("\ufffd") <= 1


def test_rewards_get_the_first_space(tmp_path):
    architecture, end = Transformer(num_layers=1, width=16), {"end_token": "</s>", "context": 64}
    save_model(tmp_path / "m", architecture, make_params(architecture, 268), metaspace(), **end)
    seen, rows, tokens = [], [{"prompt": "2 + 3 ="}] * 2, np.array([[9, 1], [10, 1]])
    reward = Reward("seen", lambda completions: seen.extend(completions) or [0.0] * len(completions))
    task = make_task(load_model(tmp_path / "m"), rows, rewards=(reward,))
    task.judge(np.arange(2), tokens)
    assert seen == [" 5", "5"] and task.texts(np.arange(2), tokens) == seen


TRIM = CHATML.replace("message.content", "message.content | trim")
ANSWER = {"role": "assistant", "content": "The end"}
TOOLS = CHATML.replace("content }}", "content }}{% for one in message.tool_calls %}{{ one.function.name }}{% endfor %}")
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
RENDERED = [
    (CHATML, [*USER, ANSWER], "<|im_start|>assistant\nThe end"),
    (CHATML, [*USER, ANSWER | {"content": "im_end"}], "<|im_start|>assistant\nim_end"),  # a word of the template
    (CHATML, [*USER, ANSWER | {"content": ""}], "<|im_start|>assistant\n"),
    (CHATML, [*USER, ANSWER | {"content": " a "}], "<|im_start|>assistant\n a "),
    (TRIM, [*USER, ANSWER | {"content": " a "}], "<|im_start|>assistant\na"),
    (CHATML, [{"role": "user", "content": [{"type": "text", "text": t} for t in "12"]}], "user\n12<|im_end|>"),
    (CHATML, [*USER, ANSWER | {"content": [{"type": "text", "text": "a"}]}], "\na"),
    (TOOLS, [*USER, CALL, {"role": "tool", "content": "5"}], "assistant\nf<|im_end|>\n<|im_start|>tool"),
]


def test_chats_are_rendered_as_transformers_does(tmp_path):
    for number, (template, messages, text) in enumerate(RENDERED):
        folder = make_model(tmp_path / str(number), chat_template=template if number else None)
        if number == 0:
            (folder / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(folder)
        found = tokenizer.backend.decode(tokenizer.encode(messages), skip_special_tokens=False)
        assert text in found and (messages[-1]["role"] != "assistant" or found.endswith(text)), messages


WRONG_CONTENTS = None, 5, [], [{"type": "image"}], [{"type": "text", "text": None}]
WRONG_CHATS = [
    *([{"role": "user", "content": content}] for content in WRONG_CONTENTS),
    *([{"role": 1, "content": "a"}], ["a", "b"], {"role": "user", "content": "a"}, None, 3, [{"role": "user"}]),
]


def test_what_is_no_chat_is_refused(tmp_path):
    tokenizer = load_tokenizer(make_model(tmp_path))
    for prompt in (*WRONG_CHATS, b"a", [*USER, CALL], [*USER, CALL, *USER]):  # the last: a template without tools
        for give in (tokenizer.encode, lambda chat: encode_prompts(tokenizer, [chat])):
            with pytest.raises(ConfigError):
                give(prompt)


def test_prompts_are_encoded_whatever_they_come_from(tmp_path):
    tokenizer = load_tokenizer(make_model(tmp_path))
    prompts, (one, two, three) = as_prompts([{"prompt": "12"}, {"prompt": "3"}]), tokenizer.encode("123")
    for given in (prompts, ("12", "3"), ["12", "3"]):
        tokens = encode_prompts(tokenizer, given)
        assert tokens.tolist() == [[one, two], [-1, three]] and tokens.dtype == np.int32
        assert tokenizer.decode(tokens[1]) == "3"
    for call, wrong in (
        *((as_prompts, each) for each in ("12", {"prompt": "12"}, prompts, ["12"], [b"12"], [])),
        *((tokenizer.decode, each) for each in ([[1, 2]], [1.5], np.zeros((1, 2), int))),
        *((functools.partial(encode_prompts, tokenizer), each) for each in ("12", b"12", 3, [], [3], [""], [USER[0]])),
    ):
        with pytest.raises(ConfigError, match="prompt|tokens are whole numbers"):
            call(wrong)


THINK = CHATML.replace("assistant\n{%", "assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{%", 1)


def test_variables_of_the_template(tmp_path):
    folder = make_model(tmp_path, chat_template=THINK)
    model = load_model(folder, template_variables={"enable_thinking": False})
    assert model.tokenizer.render(USER).endswith("assistant\n<think></think>")
    assert load_tokenizer(folder).render(USER).endswith("assistant\n")
    tasks = [make_task(each, [{"messages": USER}]) for each in (model, load_model(folder))]
    assert tasks[0].digest != tasks[1].digest and tasks[0].identity[2] == ({"enable_thinking": False}, {})
    words = {"a=false": False, "a=1 May": "1 May", 'a={"b": [1]}': {"b": [1]}, "a=": ""}
    assert [language_flags.template_variable(word)[1] for word in words] == [*words.values()]
    with pytest.raises(ConfigError, match="--template-variable a has no value"):
        language_flags.template_variable("a")
    with pytest.raises(ConfigError, match="reads no variable 'thinking', only: enable_thinking"):
        load_tokenizer(folder, template_variables={"thinking": True})
    with pytest.raises(ConfigError, match="no chat template for the variables enable_thinking"):
        load_tokenizer(make_model(tmp_path / "no", chat_template=None), template_variables={"enable_thinking": True})


def test_the_date_of_a_template_is_fixed_and_named(tmp_path, monkeypatch):
    class Clock(datetime.datetime):
        now = classmethod(lambda cls, tz=None: day)

    monkeypatch.setattr(chat.datetime, "datetime", Clock)
    day, tasks = datetime.datetime(2026, 1, 1, 12), []
    dated = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b') %}{% endif %}{{ date_string }}"
    )
    folder = make_model(tmp_path, chat_template=dated + CHATML)
    tokenizer = load_tokenizer(folder)
    for hours in (11, 12):
        day += datetime.timedelta(hours=hours)
        tasks.append(make_task(load_model(folder), [{"messages": USER}]))
        assert tokenizer.render(USER).startswith("01 Jan<|im_start|>"), "as when it was loaded"
    assert tasks[0].identity[::2] != tasks[1].identity[::2]
    assert language_training.recorded_template(tmp_path) == {}
    language_training.record_template(tmp_path, tasks[0])  # for grpo-jax lm --resume
    again = load_model(folder, date=language_training.recorded_template(tmp_path)["date"])
    assert make_task(again, [{"messages": USER}]).identity[::2] == tasks[0].identity[::2]
    given = load_model(folder, template_variables={"date_string": "1 May"})
    assert make_task(given, [{"messages": USER}]).identity[2][1] == {}, "no date is read"
    with pytest.raises(ConfigError, match="date='today' is no date in ISO's format"):
        load_model(folder, date="today")


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_prompts_have_fields_and_line_numbers(tmp_path):
    path = write(tmp_path, {"prompt": "1 +", "answer": 1}, "", {"prompt": "2 +", "answer": None})
    prompts = read_prompts(path)
    assert prompts.contents == ["1 +", "2 +"] and prompts.fields == {"answer": [1, None]}
    assert prompts.sources == [f"{path}, line 1", f"{path}, line 3"] and not prompts.are_chats
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\r\n'.encode())
    assert read_prompts(path).contents == ["a\u2028b\x85c", "d"], "only line feeds end a line"
    for name in ("prompt", "messages"):
        prompts = read_prompts(write(tmp_path, {name: USER, "id": 7}))
        assert prompts.contents == [USER] and prompts.are_chats and prompts.fields == {"id": [7]}


EITHER = "is no object with either prompt or messages: "
WRONG = [
    *(([""], "is empty; write a line such as"), ([{"prompt": "a"}, "{prompt}"], "line 2 cannot be read: .*write obj")),
    *((["[" * 100_000], "line 1 cannot be read"), (["[1]"], f"line 1 {EITHER}")),
    ([{"prompt": "a"}, {"text": "b"}], f"line 2 {EITHER}"),
    ([{"prompt": "a", "messages": USER}], f"line 1 {EITHER}"),
    *(([{"messages": each}], "line 1: a prompt is a text, or a list of mes") for each in WRONG_CHATS),
    ([{"prompt": "a", "answer": 1}, {"prompt": "b"}], "line 2 lacks the field 'answer', unlike"),
    ([{"prompt": "a"}, {"prompt": "b", "answer": 1}], "line 2 has the field 'answer', unlike .*1;"),
    ([{"prompt": "a"}, {"messages": USER}], "line 2: some prompts are texts and others messages"),
    ([{"prompt": "a", "completions": 1}], "line 1: the field 'completions' has the name of an argument"),
]


def test_a_wrong_line_is_named(tmp_path):
    for lines, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            read_prompts(write(tmp_path, *lines))
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
