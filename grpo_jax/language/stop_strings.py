"""Stop strings: which tokens complete them in the text of a completion."""

import json
from collections.abc import Sequence

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.language.tokenizer import Tokenizer


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
