"""A language task: the prompts as tokens, and the rewards of completions, on the host."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError
from grpo_jax.language.models import LanguageModel
from grpo_jax.language.prompts import Prompts
from grpo_jax.language.rewards import Reward, call_rewards, check_rewards, totals
from grpo_jax.language.turns import Conversations


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageTask:
    """Prompts, rewards, and a model that completes the prompts.

    Raises:
      ConfigError: a prompt with its completion is too long, or a reward or the held-out prompts need other fields.
    """

    model: LanguageModel
    prompts: Prompts
    """Prompts to train on."""
    rewards: tuple[Reward, ...]
    held_out: Prompts | None = None
    """Prompts that training never draws."""
    max_completion: int = 256
    """The most tokens of a completion; longer ones are cut off."""
    process_rewards: bool = False
    """Pay rewards of steps within a completion where the steps end, instead of all at the end of the completion."""
    stop_strings: tuple[str, ...] = ()
    """A completion also ends with the token that completes one of these in its text, which keeps the string."""
    respond: Callable | None = None
    """Of a chat up to a completion, `(messages) -> text`, a message or None: an answer, after which the model goes on;
    may be async. All turns together have at most `max_completion` tokens."""
    max_turns: int | None = None
    """The most messages of the model in a conversation; None: 4."""

    def __post_init__(self):
        """Checks the fields."""
        training, held_out = self.prompts, self.held_out or self.prompts
        if (held_out.fields.keys(), held_out.are_chats) != (training.fields.keys(), training.are_chats):
            fields = f"{sorted(held_out.fields)}, and those to train on {sorted(training.fields)}"
            advice = "write both in the same way, as texts or as chats"
            raise ConfigError(f"{held_out.sources[0]}: held-out prompts have the fields {fields}; {advice}")
        check_rewards(self.rewards, list(self.prompts.fields), self.prompts.sources[0])
        self.tokens, self.stops, self.conversations  # noqa: B018, check lengths, strings, the tokenizer and `respond`
        if self.respond is None and self.max_turns is not None:
            raise ConfigError(f"max_turns={self.max_turns} (--max-turns) needs respond (--respond), which answers")
        if self.respond is not None and self.process_rewards:
            raise ConfigError("rewards of steps are for a single turn; leave out process_rewards, or respond")

    @property
    def num_training(self) -> int:
        """Prompts to train on; in `tokens`, the held-out ones follow them."""
        return len(self.prompts.contents)

    @functools.cached_property
    def all_prompts(self) -> Prompts:
        """The prompts to train on, then the held-out ones."""
        first, second = self.prompts, self.held_out or self.prompts.select(())
        fields = {name: [*values, *second.fields[name]] for name, values in first.fields.items()}
        return Prompts([*first.contents, *second.contents], fields, [*first.sources, *second.sources])

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """int32 `[N, P]`: the tokens of all prompts, padded with -1 on the left, to a multiple of 8: few programs."""
        tokens = self.model.encode(self.all_prompts, self.max_completion)
        return np.pad(tokens, [(0, 0), (-tokens.shape[1] % 8, 0)], constant_values=PAD)

    @functools.cached_property
    def conversations(self) -> Conversations:
        """The completions as messages, and the answers to them."""
        max_turns = 4 if self.max_turns is None else self.max_turns
        return Conversations(self.model.tokenizer, self.all_prompts, self.tokens, self.respond, max_turns)

    @functools.cached_property
    def stops(self) -> tuple[np.ndarray, np.ndarray] | None:
        """What finds the stop strings: see `stop_moves`; None without any."""
        return self.model.stops(self.stop_strings)

    def is_cut(self, tokens: np.ndarray, answers: np.ndarray | None = None) -> np.ndarray:
        """Whether the limit has cut completions, int `[..., L]`, -1 after the end, or an answer: bool `[...]`."""
        tokens = np.asarray(tokens)
        cut = (tokens[..., -1] != PAD) & ~np.isin(tokens[..., -1], self.model.tokenizer.end_tokens)
        for place in zip(*np.nonzero(cut), strict=True) if self.stop_strings else ():
            text, before = map(self.model.tokenizer.decode, (tokens[place], tokens[place][:-1]))
            cut[place] = all(text.count(string) == before.count(string) for string in self.stop_strings)
        return cut if answers is None else cut | (answers[..., -1] != PAD)

    def texts(self, prompt: np.ndarray, tokens: np.ndarray, answers: np.ndarray | None = None) -> list:
        """The texts of completions, see `judge`; with `respond` lists of those of all messages, also the answers."""
        if self.respond is not None:
            return [[each["content"] for each in chat] for chat in self.conversations.messages(prompt, tokens, answers)]
        tokens = np.asarray(tokens)
        rows = zip(tokens.reshape(-1, tokens.shape[-1]), self.tokens[np.ravel(prompt)], strict=True)
        return [self.model.tokenizer.decode(row, before) for row, before in rows]

    def judge(
        self, prompt: np.ndarray, tokens: np.ndarray, *, steps: bool = False, answers: Any = None, iteration: Any = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The value of each reward, float32 `[..., K]`, 0 if it does not apply, and whether it does, bool.

        Args:
          prompt: int `[...]`: indices of prompts.
          tokens: int `[..., L]`: their completions, -1 after the end.
          steps: give values at each token, `[..., L, K]`, instead of their sums: a step is paid by the token that
            completes its text, and a whole completion by its last token.
          answers: int `[..., L]`: the tokens of answers at their places, -1 elsewhere; None: there are none.
          iteration: how many were made before, a number or int `[...]`.
        """
        arguments = self._reward_arguments(prompt, tokens, answers)
        arguments["iteration"] = np.broadcast_to(iteration, np.shape(prompt)).ravel().tolist()
        payments, shape = call_rewards(self.rewards, arguments), (*np.shape(tokens), len(self.rewards))
        if not steps:
            return tuple(each.reshape(*shape[:-2], shape[-1]) for each in totals(payments))
        ids, before = arguments["completion_ids"], self.tokens[np.ravel(prompt)]
        values, rewarded = np.zeros((len(ids), *shape[-2:]), np.float32), np.zeros((len(ids), *shape[-2:]), bool)
        for number, row in np.ndindex(len(payments), len(ids)):
            for length, value in payments[number][row] or ():
                last = max(len(ids[row]) - 1, 0)
                index = last if length is None else self.model.tokenizer.token_index(ids[row], length, before[row])
                values[row, index, number] += value
                rewarded[row, index, number] = True
        return values.reshape(shape), rewarded.reshape(shape)

    def _reward_arguments(self, prompt: np.ndarray, tokens: np.ndarray, answers: np.ndarray | None) -> dict:
        """The arguments of the rewards by name, see `call_rewards`."""
        rows, flat = self.all_prompts.select(np.ravel(prompt).tolist()), np.reshape(tokens, (-1, np.shape(tokens)[-1]))
        ids = [[token for token in row if token != PAD] for row in flat.tolist()]
        read = self.conversations.messages if self.prompts.are_chats else self.texts
        completions = read(prompt, tokens, answers)
        given = {"prompts": rows.contents, "completions": completions, "completion_ids": ids}
        return {**given, "max_completion": [self.max_completion] * len(ids), **rows.fields}

    @property
    def identity(self) -> tuple:
        """What a resumed run compares: the digest, the rewards with their code, and what the template was given."""
        template = self.model.tokenizer.template
        return self.digest, self.rewards, template and (template.variables, template.dates), self.respond

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything that the rewards of a run depend on, except their code."""
        rewards = [[reward.name, reward.weight] for reward in self.rewards]
        prompts = [self.all_prompts.contents, self.all_prompts.fields, self.num_training]
        settings = [self.max_completion, self.model.tokenizer.end_tokens] + [True] * self.process_rewards
        settings += [*self.stop_strings] + [self.conversations.max_turns] * (self.respond is not None)
        text = json.dumps([rewards, prompts, *settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode() + self.tokens.tobytes()).hexdigest()[:8]
