"""Several turns: what `respond` answers to a completion is added to it, and the model goes on.

All is played again with the answers in it. The same random numbers give the same tokens up to a new answer, and others
after it: one compiled program plays every turn, and its last result is the whole conversation.
"""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.language.chat import as_messages
from grpo_jax.language.prompts import Prompts
from grpo_jax.language.rewards import RewardError, awaited, errors_of
from grpo_jax.language.tokenizer import Tokenizer

ADVICE = "let it return the text of an answer, a message such as {'role': 'tool', 'content': '5'}, or None"


@dataclasses.dataclass(eq=False)
class Conversations:
    """Completions of a task's prompts as messages, and what `respond` answers, which is kept in `messages_of`.

    Warns of a template that changes earlier turns. Raises ConfigError for what cannot be answered.
    """

    tokenizer: Tokenizer
    prompts: Prompts
    tokens: np.ndarray  # int [N, P]: those of the prompts, -1 on the left
    respond: Callable | None
    max_turns: int
    # The latest answers, by the prompt and all tokens up to their end.
    messages_of: dict[tuple, dict] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Checks that there are chats to answer."""
        if self.respond is None:
            return
        if not callable(self.respond):
            raise ConfigError(f"respond={self.respond!r:.200} is no function; write def respond(messages): return None")
        as_count("max_turns", self.max_turns)
        for prompt, source in zip(self.prompts.contents, self.prompts.sources, strict=True):
            if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":
                raise ConfigError(f"{source}: respond needs chats that end with a user's message, not {prompt!r:.200}")
        turn = {"role": "assistant", "content": "<think>\nA\n</think>\n\nB"}, {"role": "user", "content": "C"}
        texts = [self.tokenizer.render([*prompt, *turn * number]) for number in range(3)]
        if not all(after.startswith(before + turn[0]["content"]) for before, after in itertools.pairwise(texts)):
            text = "the model's chat template changes earlier messages of the assistant, mostly its thoughts"
            warnings.warn(f"{text}; training does not", stacklevel=2)

    def messages(self, prompt: np.ndarray, tokens: np.ndarray, answers: np.ndarray | None) -> list[list[dict]]:
        """The messages after each of the `N` prompts: the model's, and between them the answers.

        The arguments are those of `LanguageTask.judge`.
        """
        chats, limit = [], np.shape(tokens)[-1]
        answers = np.full(np.shape(tokens), PAD) if answers is None else answers
        rows = np.ravel(prompt).tolist(), *(np.reshape(each, (-1, limit)) for each in (tokens, answers))
        for index, row, answer in zip(*rows, strict=True):
            chat, bounds = [], [0, *np.flatnonzero(np.diff(answer >= 0)) + 1, limit]
            for number, (begin, end) in enumerate(itertools.pairwise(bounds)):  # the model's and answers, in turn
                if number % 2 == 0:
                    text = self.tokenizer.decode(row[begin:end], [*self.tokens[index], *row[:begin]])
                    chat.append({"role": "assistant", "content": text})
                elif end < limit:  # else the limit has cut it
                    chat.append(self.messages_of[index, *row[:end].tolist()])
            chats.append(chat)
        return chats

    def answer(self, prompt: np.ndarray, tokens: np.ndarray, answers: np.ndarray) -> np.ndarray | None:
        """The answers so far and those to the completions that have ended since; None if there is no new one.

        The arguments are those of `messages`. The limit cuts an answer that does not fit, which ends the conversation.
        """
        if self.respond is None:
            return None
        chats, limit = self.messages(prompt, tokens, answers), np.shape(tokens)[-1]
        rows, new = np.reshape(tokens, (-1, limit)), np.reshape(answers, (-1, limit)).copy()
        lengths, turns = (rows != PAD).sum(axis=1), np.array([len(chat) // 2 + 1 for chat in chats]) + (new[:, -1] >= 0)
        # `respond` has returned None to those of fewer turns.
        asked = np.flatnonzero((lengths < limit) & (turns == turns.max()) & (turns < self.max_turns))
        prompts = np.ravel(prompt).tolist()
        whole = [[*self.prompts.contents[prompts[row]], *chats[row]] for row in asked]
        for row, chat, answer in zip(asked, whole, _ask(self.respond, whole), strict=True):
            if answer is not None:
                end = lengths[row]
                ids = self.tokenizer.encode_reply(chat, answer, after=rows[row, end - 1])
                self.messages_of[prompts[row], *rows[row, :end].tolist(), *ids] = answer
                new[row, end : end + len(ids)] = ids[: limit - end]
        new = new.reshape(np.shape(answers))
        return None if (new == answers).all() else new


def _ask(respond: Callable, chats: list[list]) -> list[dict | None]:
    """The answer to each conversation, a message, or None; those that are awaitable are awaited together."""
    error = "respond", [], ADVICE
    with errors_of(*error):
        answers = [respond(as_messages(chat)) for chat in chats]
    return [None if answer is None else _message(answer) for answer in awaited(answers, [error] * len(answers))]


def _message(answer: Any) -> dict:
    """A text as a message of the user, or a message, but of the assistant; RewardError for anything else."""
    with contextlib.suppress(ConfigError):
        (message,) = as_messages([{"role": "user", "content": answer} if isinstance(answer, str) else answer])
        if message["role"] != "assistant":
            return message
    raise RewardError(f"respond returned {answer!r:.200}; {ADVICE}")
