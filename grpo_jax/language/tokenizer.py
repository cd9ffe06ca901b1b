"""The tokenizer of a model folder: text to tokens and back, and the tokens and texts that end a completion."""

import bisect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.errors import ConfigError
from grpo_jax.language.chat import ChatTemplate, Messages, load_chat_template, special_tokens
from grpo_jax.language.folder import as_config_error, file_in, need, read_fields
from grpo_jax.recording.files import as_path

Prompt = str | Messages
"""A text, or a chat."""

_CUT = "\ufffd"  # stands for bytes that are no character


class Tokenizer:
    """Texts and chats to tokens and back.

    Args:
      backend: a `tokenizers.Tokenizer`; what it says of truncation, padding and dropout is left out.
      end_tokens: each ends a completion.
      template: of chats; None: the model reads plain texts only.

    Attributes:
      backend, end_tokens, template: the arguments.
      num_tokens: int, one more than the largest token.
    """

    def __init__(self, backend: Any, end_tokens: Iterable[int], template: ChatTemplate | None = None):
        if backend.truncation or backend.padding or getattr(backend.model, "dropout", None):
            backend = type(backend).from_str(backend.to_str())  # the argument stays as it is
            backend.no_truncation()
            backend.no_padding()
            if hasattr(backend.model, "dropout"):
                backend.model.dropout = None
        self.backend, self.end_tokens, self.template = backend, tuple(end_tokens), template
        self.num_tokens = max([*backend.get_vocab().values(), *self.end_tokens]) + 1

    def render(self, messages: Messages) -> str:
        """The text that the model reads for a chat: see `ChatTemplate.render`; ConfigError without a chat template."""
        if self.template is None:
            advice = "write prompts as text, without a system prompt, or use a model for chats"
            raise ConfigError(f"the model's folder has no chat template, so it cannot read messages; {advice}")
        return self.template.render(messages)

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a text or a chat that is to be completed: see `render`.

        A text has the special tokens at its beginning, but not those that the tokenizer would append.
        """
        if not isinstance(prompt, str):
            return self._encoding(self.render(prompt)).ids
        found = self._encoding(prompt, add_special_tokens=True)
        tokens, appended = found.ids, found.special_tokens_mask
        while tokens and appended[len(tokens) - 1] and (tokens[-1] in self.end_tokens or not all(appended)):
            tokens.pop()
        return tokens

    def encode_reply(self, messages: Messages, answer: Mapping[str, Any], *, after: int) -> list[int]:
        """The tokens from the assistant's last message to its next one; `after`, the last so far, may have ended it.

        ConfigError if the chat template leaves out a part of the answer, as some do all that a tool says.
        """
        mark = "THE_LAST_MESSAGE"
        text = self.render([*messages[:-1], {**messages[-1], "content": mark}, answer]).rpartition(mark)[2]
        if not all(word in text for word in re.findall(r"\w+", answer["content"])):
            raise ConfigError(f"the chat template leaves out a part of {answer!r:.200}; let respond return a text")
        tokens = self._encoding(text).ids
        return tokens[after in self.end_tokens and not {*tokens[:1]}.isdisjoint(self.end_tokens) :]

    def _encoding(self, text: str, *, add_special_tokens: bool = False) -> Any:
        with as_config_error(f"{text!r:.200} is not a text in Unicode, as where half of a surrogate pair is alone: %s"):
            text.encode()
        with as_config_error(f"tokenizer.json fails for {text[:200]!r}: %s; copy the file again"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Iterable[int], after: Iterable[int] = ()) -> str:
        """The text of tokens, without special ones and `PAD`.

        Args:
          tokens: `[L]`.
          after: the tokens before them, such as their prompt, whose text this one continues.
        """
        tokens, (context, before) = _as_tokens(tokens), self._context(_as_tokens(after))
        text = self._text(context + tokens)
        # A letter that has no right bytes changes what stands before it in the text of some tokenizers.
        return text[len(before) :] if text.startswith(before) else self._text(tokens)

    def token_index(self, tokens: Sequence[int], length: int, after: Iterable[int] = ()) -> int:
        """The index of the first token up to which the text has its first `length` characters."""
        text = self.decode(tokens, after)[:length]
        ends = range(1, len(tokens) + 1)
        return bisect.bisect_left(ends, True, key=lambda end: self.decode(tokens[:end], after)[:length] == text)

    def _context(self, tokens: list[int]) -> tuple[list[int], str]:
        """The last of these tokens on which the text of a continuation depends, and their text."""
        for size in (16, 64, 256):
            text = self._text(tokens[-size:])
            if text.strip() and _CUT not in text:
                return tokens[-size:], text
        return tokens, self._text(tokens)

    def _text(self, tokens: list[int]) -> str:
        """The text, which ends with one `_CUT` if its last character is incomplete."""
        text = self.backend.decode(tokens)
        for size in range(1, 5) if text.endswith(_CUT) else ():
            whole = self.backend.decode(tokens[:-size])
            if not whole.endswith(_CUT):
                return text if text.startswith(whole) else whole + _CUT
        return text


def load_tokenizer(
    folder: str | Path, *, template_variables: Mapping[str, Any] | None = None, date: str | None = None
) -> Tokenizer:
    """The tokenizer of a folder with tokenizer.json.

    Its end tokens come from generation_config.json, config.json and tokenizer_config.json together.

    Args:
      folder: of a model.
      template_variables: values for its chat template, such as `{"enable_thinking": False}`.
      date: what the template takes for the current time, such as "2026-01-31"; None: that of this call.

    Raises:
      ConfigError: a file or a package is missing, no end token is named, or the template reads no such variable.
    """
    folder = as_path(folder)
    path = file_in(folder, "tokenizer.json")
    if not path.exists():
        raise ConfigError(
            f"{folder} has no tokenizer.json; name the folder of a model with its tokenizer (transformers writes the "
            "file with AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
        )
    tokenizers = need("tokenizers")
    with as_config_error(f"{path} cannot be read: %s; copy the file again, or write it anew"):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    description = read_fields(folder, "tokenizer_config.json", {"chat_template": str | list[dict[str, str]]})
    if description.get("split_special_tokens"):
        raise ConfigError(f"{folder / 'tokenizer_config.json'}: split_special_tokens is not supported; leave it out")
    ends = []
    for name in ("generation_config.json", "config.json"):
        found = read_fields(folder, name, {"eos_token_id": int | list[int]}).get("eos_token_id")
        ends += found if isinstance(found, list) else [found]
    ends.append(tokenizer.token_to_id(special_tokens(description).get("eos_token", "")))
    ends = list(dict.fromkeys(end for end in ends if end is not None and end >= 0))  # -1: none
    if not ends:
        raise ConfigError(f"{folder} names no end token, so completions never end; config.json needs eos_token_id")
    return Tokenizer(tokenizer, ends, load_chat_template(folder, description, variables=template_variables, date=date))


def _as_tokens(tokens: Iterable[int]) -> list[int]:
    """A row of tokens without `PAD`."""
    row = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ConfigError(f"tokens are whole numbers [L], but these are {row.dtype} {list(row.shape)}; give one row")
    return [token for token in row.tolist() if token != PAD]


def stop_moves(strings: Sequence[str], tokenizer: Tokenizer, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """What finds `S` strings in the text of `V` tokens, one token at a time, wherever the tokens divide the text.

    For each string an automaton counts how many of its bytes the text ends with. A token moves it as all of its bytes
    do: one lookup. ConfigError if what a token adds to a text depends on those before, unlike in a byte-level BPE.

    Returns:
      int32 `[S, Q, V]`, the count after each token, for each count before it; a string that was found stays so. And int
      `[S]`, the bytes of each string, a count that means that the text contains it.
    """
    encoded, token_bytes = [string.encode() for string in strings], _token_bytes(tokenizer, num_tokens)
    size, lengths = max(map(len, token_bytes)), np.array([len(each) for each in encoded])
    letters = np.array([list(each) + [-1] * (size - len(each)) for each in token_bytes])  # [V, size]
    all_moves = np.zeros((len(encoded), max(lengths) + 1, num_tokens), np.int32)
    for string, move in zip(encoded, all_moves, strict=True):
        before = np.arange(len(string) + 1)[:, None]
        moves = np.array([[_count(string, count, letter) for letter in range(256)] for count in before[:, 0]])
        counts = np.broadcast_to(before, (len(before), num_tokens))
        for letter in letters.T:
            counts = np.where(letter >= 0, moves[counts, letter], counts)
        move[: len(before)] = counts
    return all_moves, lengths


def _count(string: bytes, before: int, letter: int) -> int:
    """How many bytes of the string a text ends with, after this byte, if it was so many before."""
    if before == len(string):
        return before
    text = string[:before] + bytes([letter])
    return next(count for count in range(len(text), -1, -1) if text.endswith(string[:count]))


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))}


def _token_bytes(tokenizer: Tokenizer, num_tokens: int) -> list[bytes]:
    """`[num_tokens]`: what each token adds to a text, in UTF-8; nothing, if it is special or not there."""
    decoder = json.loads(tokenizer.backend.to_str())["decoder"] or {}
    if "ByteLevel" not in {part["type"] for part in decoder.get("decoders", [decoder]) if part}:
        advice = "leave them out, and let a reward judge the text before the string"
        raise ConfigError(f"stop strings need a tokenizer of bytes (byte-level BPE, as of Llama 3 and Qwen); {advice}")
    special = {token for token, added in tokenizer.backend.get_added_tokens_decoder().items() if added.special}
    names = [None if token in special else tokenizer.backend.id_to_token(token) for token in range(num_tokens)]
    # A name with other letters stands for itself.
    return [bytes(map(_BYTES.get, n)) if _BYTES.keys() >= {*n} else n.encode() for n in (each or "" for each in names)]
