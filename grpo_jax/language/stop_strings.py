"""Stop strings: which tokens complete them in the text of a completion."""

from collections.abc import Sequence

import numpy as np


class StopStrings:
    """Finds strings in the text of tokens, one token at a time, wherever the tokens divide the text.

    For each string an automaton counts how many of its bytes the text ends with. A token moves it as all of its bytes
    do: one lookup.

    Args:
      strings: `S` strings, none of which is empty.
      token_bytes: `[V]` what each token adds to the text, in UTF-8.

    Attributes:
      lengths: int `[S]`, the bytes of each string: a count that means that the text contains it.
      moves: int32 `[S, Q, V]`, the count after each token, for each count before it. A string that was found stays so.
    """

    def __init__(self, strings: Sequence[str], token_bytes: Sequence[bytes]):
        encoded = [string.encode() for string in strings]
        self.lengths = np.array([len(each) for each in encoded])
        size = max(map(len, token_bytes))
        letters = np.array([list(each) + [-1] * (size - len(each)) for each in token_bytes])  # [V, size]
        self.moves = np.zeros((len(encoded), max(self.lengths) + 1, len(token_bytes)), np.int32)
        for string, move in zip(encoded, self.moves, strict=True):
            before = np.arange(len(string) + 1)[:, None]
            moves = np.array([[_count(string, count, letter) for letter in range(256)] for count in before[:, 0]])
            counts = np.broadcast_to(before, (len(before), len(token_bytes)))
            for letter in letters.T:
                counts = np.where(letter >= 0, moves[counts, letter], counts)
            move[: len(before)] = counts


def _count(string: bytes, before: int, letter: int) -> int:
    """How many bytes of the string a text ends with, after this byte, if it was so many before."""
    if before == len(string):
        return before
    text = string[:before] + bytes([letter])
    return next(count for count in range(len(text), -1, -1) if text.endswith(string[:count]))
