"""Several turns: what `respond` answers to a completion is added to it, and the model goes on.

All is played again with the answers in it. The same random numbers give the same tokens up to a new answer, and others
after it: one compiled program plays every turn, and its last result is the whole conversation.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError
from grpo_jax.language.chat import as_messages
from grpo_jax.language.rewards import RewardError, errors_of, finished

if TYPE_CHECKING:
    from grpo_jax.language.task import LanguageTask

ANSWER = CLOSED = PAD - 1
"""Among tokens: one of an answer. Among the tokens of answers: the completion before gets none."""

ADVICE = "let it return the text of an answer, a message such as {'role': 'tool', 'content': '5'}, or None"


def check_turns(task: "LanguageTask") -> None:
    """Raises ConfigError for turns that cannot be played, and warns of a template that changes earlier turns."""
    if task.max_turns < 2:
        raise ConfigError(f"max_turns={task.max_turns} leaves no turn after an answer of respond; use 2 or more")
    if task.process_rewards:
        raise ConfigError("rewards of steps are for completions of one turn; leave out process_rewards, or respond")
    for prompt, source in zip(task.all_prompts.contents, task.all_prompts.sources, strict=True):
        if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":
            raise ConfigError(f"{source}: respond needs chats that end with a message of the user, not {prompt!r:.200}")
    turn = {"role": "assistant", "content": "<think>\nA\n</think>\n\nB"}, {"role": "user", "content": "C"}
    texts = [task.model.tokenizer.render([*prompt, *turn * number]) for number in range(3)]
    if any(not b.startswith(a + turn[0]["content"]) for a, b in zip(texts[:-1], texts[1:], strict=True)):
        text = "the model's chat template shows earlier messages of the assistant otherwise than it wrote them, mostly"
        warnings.warn(f"{text} without its thoughts; in training they stay as they are", stacklevel=2)


def complete_turns(
    task: "LanguageTask", prompt: np.ndarray, complete: Callable[[np.ndarray], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that `complete(answers)` gives, with all answers in them, and these; as of `with_answers`."""
    more = np.full((*np.shape(prompt), task.max_completion), PAD, np.int32)
    while more is not None:
        answers, tokens = more, np.asarray(complete(more))
        more = None if task.respond is None else with_answers(task, prompt, tokens, answers)
    return tokens, answers


def with_answers(
    task: "LanguageTask", prompt: np.ndarray, tokens: np.ndarray, answers: np.ndarray
) -> np.ndarray | None:
    """The answers in completions, with those to the turns that have ended; None if there is no new one.

    The limit cuts an answer that does not fit, which ends the conversation.

    Args:
      task: with `respond` and `max_turns`.
      prompt: int `[...]`: indices of the prompts.
      tokens: int `[..., L]`: completions, -1 after the end.
      answers: int32 `[..., L]`: the tokens of answers so far, at their places, and negative numbers elsewhere.
    """
    chats, prompts = conversations(task, prompt, tokens, answers), np.ravel(prompt)
    rows, new = tokens.reshape(len(chats), -1), answers.reshape(len(chats), -1).copy()
    lengths, limit = (rows != PAD).sum(axis=1), rows.shape[1]
    may_go_on = np.array([len(chat) < 2 * task.max_turns - 1 for chat in chats]) & (lengths < limit)
    asked = np.flatnonzero(may_go_on & ~task.is_cut(rows, new) & (new != CLOSED).all(axis=1))
    whole = [[*task.all_prompts.contents[prompts[row]], *chats[row]] for row in asked]
    for row, chat, answer in zip(asked, whole, _ask(task.respond, whole), strict=True):
        ids, end = [CLOSED], lengths[row]
        if answer is not None:
            ids = task.model.tokenizer.encode_reply(chat, answer, after=rows[row, end - 1])
            task.messages_of[tuple(ids)] = answer
        new[row, end : end + len(ids)] = ids[: limit - end]
    return new.reshape(answers.shape) if ((new >= 0) & (answers.reshape(new.shape) < 0)).any() else None


def conversations(
    task: "LanguageTask", prompt: np.ndarray, tokens: np.ndarray, answers: np.ndarray
) -> list[list[dict[str, Any]]]:
    """The messages after each of the `N` prompts, the model's and between them the answers; as of `with_answers`."""
    chats, length = [], tokens.shape[-1]
    rows = task.tokens[np.ravel(prompt)], tokens.reshape(-1, length), answers.reshape(-1, length)
    for before, row, answer in zip(*rows, strict=True):
        ends = [*np.flatnonzero(np.diff(answer >= 0)) + 1, length]
        parts, chat = zip([0, *ends[:-1]], ends, strict=True), []
        for begin, end in parts:
            if answer[begin] < 0 and (row[begin] != PAD or begin == 0):
                text = task.model.tokenizer.decode(row[begin:end], [*before, *row[:begin]])
                chat.append({"role": "assistant", "content": text})
            elif message := task.messages_of.get(tuple(answer[begin:end].tolist())):  # else the limit has cut it
                chat.append(message)
        chats.append(chat)
    return chats


def _ask(respond: Callable, chats: list[list]) -> list[dict[str, Any] | None]:
    """The answer to each conversation, a message, or None; those that are awaitable are awaited together."""
    errors, results = functools.partial(errors_of, "respond", [], ADVICE), []
    for chat in chats:
        with errors():
            results.append(respond(copy.deepcopy(chat)))
    return [None if answer is None else _message(answer) for answer in finished(results, [errors] * len(results))]


def _message(answer: Any) -> dict[str, Any]:
    """A text as a message of the user, or a message; RewardError for anything else."""
    try:
        (message,) = as_messages([{"role": "user", "content": answer} if isinstance(answer, str) else answer])
    except ConfigError as error:
        raise RewardError(f"respond returned {answer!r:.200}; {ADVICE}") from error
    if message["role"] == "assistant":
        raise RewardError(f"respond returned a message of the assistant, {answer!r:.200}; {ADVICE}")
    return message
