"""What `experiments.pretrained` asks a small language model: prompts with a right answer, and their rewards."""

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Task(NamedTuple):
    """Prompts of one kind, as lines of JSON, and the flags of `grpo-jax lm` that go with them."""

    prompts: list[dict[str, Any]]
    held_out: list[dict[str, Any]]  # 40, of words or pairs of numbers that training never sees
    num_iterations: int
    flags: str


ADJECTIVES = {
    "positive": (
        "wonderful brilliant lovely excellent amazing perfect charming fantastic superb delightful great outstanding "
        "beautiful impressive enjoyable marvelous terrific splendid magnificent pleasant remarkable incredible good "
        "nice awesome exceptional refreshing stunning graceful reliable"
    ),
    "negative": (
        "terrible awful boring horrible disappointing dreadful dull bad ugly annoying poor useless disgusting "
        "miserable mediocre pathetic unpleasant lousy nasty broken worthless frustrating unbearable tedious painful "
        "ridiculous clumsy offensive unreliable overpriced"
    ),
}
HELD_OUT_ADJECTIVES = {
    "positive": "fabulous gorgeous spectacular exquisite lovable flawless elegant inspiring satisfying exciting",
    "negative": "atrocious hideous appalling depressing inferior defective dismal irritating shameful revolting",
}

SUBJECTS = (
    *("The movie was", "The food was", "The hotel was", "This book is", "My new phone is", "The concert was"),
    *("The service was", "This chair is", "The trip was", "Our guide was", "The lesson was", "This game is"),
)
HELD_OUT_SUBJECTS = ("The museum was", "This jacket is", "The play was", "My new laptop is")

NOUNS = (
    "apple river chair music garden window stone pencil bread cloud horse table lamp forest winter bottle market "
    "doctor summer paper dog train sun book house city letter bird door clock flower teacher ship mountain coffee boy "
    "girl car rain school"
)
HELD_OUT_NOUNS = "cat bridge moon candle farmer island phone snow kitchen guitar queen boat tree field shoe baby"

ANIMALS = (
    "dog cat horse cow sheep pig goat lion tiger bear wolf fox rabbit mouse rat elephant giraffe zebra monkey deer "
    "squirrel eagle owl crow duck goose frog snake lizard turtle whale dolphin shark salmon bee ant spider butterfly "
    "camel donkey"
)
FOODS = (
    "bread cheese butter rice pasta soup salad cake cookie pie apple banana orange grape lemon potato tomato carrot "
    "onion garlic pepper sugar honey jam yogurt cereal pancake sandwich pizza burger sausage bacon noodle chocolate "
    "candy omelette strawberry cabbage spinach mushroom"
)
HELD_OUT_ANIMALS = (
    "kangaroo panda leopard parrot penguin crocodile hamster beaver swan octopus seal moose cheetah gorilla otter "
    "sparrow lobster hedgehog trout buffalo"
)
HELD_OUT_FOODS = (
    "waffle muffin toast pear peach cherry broccoli celery cucumber pudding lasagna steak peanut cream biscuit mango "
    "pumpkin doughnut lettuce ketchup"
)

ROLES = ("user", "assistant")
REWARD = "--reward experiments.harness.pretrained_tasks:"


def sentiment() -> Task:
    """Is a review positive or negative? Each adjective with 4 of the subjects, held-out ones with 2 of 4 others."""
    examples = {"Review: I loved it.": "positive", "Review: It was a waste of money.": "negative"}

    def chats(adjectives, subjects, each):
        draw = np.random.default_rng(0)
        rows = [
            _chat(examples, f"Review: {subject} {adjective}.", answer=answer)
            for answer, words in adjectives.items()
            for adjective in words.split()
            for subject in draw.choice(subjects, each, replace=False)
        ]
        return [rows[index] for index in draw.permutation(len(rows))]

    held_out = chats(HELD_OUT_ADJECTIVES, HELD_OUT_SUBJECTS, 2)
    return Task(chats(ADJECTIVES, SUBJECTS, 4), held_out, 20, f"{REWARD}exact --max-completion 4")


def rule() -> Task:
    """A rule that only rewards tell: "yes" for an animal, "no" for food; the examples in the prompt are neither."""
    examples = "window: yes\nseven: no\npaper: no\nriver: yes\n"

    def texts(animals, foods):
        kinds = {"yes": animals, "no": foods}
        rows = [
            {"prompt": f"{examples}{word}:", "answer": answer} for answer in kinds for word in kinds[answer].split()
        ]
        return [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]

    flags = f"{REWARD}exact --max-completion 3 --stop-string \\n --num-prompts 16 --sample-every 20"
    return Task(texts(ANIMALS, FOODS), texts(HELD_OUT_ANIMALS, HELD_OUT_FOODS), 60, flags)


def larger() -> Task:
    """Which of two numbers from 10 to 99 is larger? Half of the time it is the first."""
    pairs = np.random.default_rng(0).permutation(list(itertools.combinations(range(10, 100), 2)))[:280].tolist()
    pairs = [pair[:: 1 - 2 * (index % 2)] for index, pair in enumerate(pairs)]
    examples = "larger of 12 and 47: 47\nlarger of 88 and 35: 88\n"
    rows = [{"prompt": f"{examples}larger of {a} and {b}:", "answer": str(max(a, b))} for a, b in pairs]
    flags = f"{REWARD}exact --max-completion 5 --stop-string \\n --num-prompts 16"
    return Task(rows[:240], rows[240:], 30, flags)


def sentence() -> Task:
    """A short sentence with two given nouns."""

    def chats(nouns, number):
        pairs = np.random.default_rng(0).permutation(list(itertools.permutations(nouns.split(), 2)))[:number].tolist()
        ask = 'Write a short sentence with the words "{}" and "{}".'
        return [_chat({}, ask.format(*pair), words=pair) for pair in pairs]

    flags = f"{REWARD}one_sentence {REWARD}both_words=0.5 --max-completion 20 --temperature 0.7"
    return Task(chats(NOUNS, 240), chats(HELD_OUT_NOUNS, 40), 12, flags)


def calculator() -> Task:
    """A product and a sum, with a tool: the examples answer an easy sum at once, and call the tool for a hard one."""
    examples = {"What is 2 + 3?": "5", "What is 58 * 4 - 9?": "calc: 58 * 4 - 9", "223": "223"}
    draw = np.random.default_rng(0)
    drawn = {tuple(draw.integers((11, 3, 3, 0), (100, 10, 31, 2)).tolist()): None for _ in range(300)}
    rows = []
    for a, b, c, is_sum in [*drawn][:280]:
        result = a * b + c if is_sum else a * b - c
        rows.append(_chat(examples, f"What is {a} * {b} {'-+'[is_sum]} {c}?", answer=str(result)))
    flags = f"{REWARD}exact --respond experiments.harness.pretrained_tasks:calculate --max-turns 3 --max-completion 40"
    sizes = "--num-prompts 4 --num-samples 2 --num-held-out 24 --sample-every 8 --learning-rate 5e-4"
    return Task(rows[:240], rows[240:], 8, f"{flags} {sizes}")


TASKS = {"sentiment": sentiment, "rule": rule, "larger": larger, "sentence": sentence, "calculator": calculator}


def calculate(messages):
    """The calculator's answer to a call such as "calc: 58 * 4 - 9"; None for anything else."""
    call = re.fullmatch(r"calc: (\d{1,9}) \* (\d{1,9}) ([+-]) (\d{1,9})", _text(messages))
    if not call:
        return None
    a, b, c = (int(call[group]) for group in (1, 2, 4))
    return str(a * b + c if call[3] == "+" else a * b - c)


def exact(completions, answer):
    """1 for the right word and nothing else."""
    return [float(_text(each) == word) for each, word in zip(completions, answer, strict=True)]


def one_sentence(completions, words):
    """1 for one sentence of 5 to 15 words that has both nouns."""
    texts = map(_text, completions)
    return [
        float(
            bool(re.fullmatch(r"[A-Z][^.!?\n]*\.", text))
            and 5 <= len(text.split()) <= 15
            and all(_has(text, noun) for noun in nouns)
        )
        for text, nouns in zip(texts, words, strict=True)
    ]


def both_words(completions, words):
    """The share of the two nouns that the text has."""
    return [sum(_has(_text(chat), noun) for noun in nouns) / 2 for chat, nouns in zip(completions, words, strict=True)]


def _has(text, noun):
    return bool(re.search(rf"\b{noun}s?\b", text.lower()))


def _text(completion):
    return (completion if isinstance(completion, str) else completion[-1]["content"]).strip()


def _chat(examples: Mapping[str, str], question: str, **fields: Any) -> dict[str, Any]:
    """A line of a file of prompts: earlier turns that show the format of an answer, the question, and the fields."""
    turns = [
        {"role": role, "content": text} for pair in examples.items() for role, text in zip(ROLES, pair, strict=True)
    ]
    return {"messages": [*turns, {"role": "user", "content": question}], **fields}
