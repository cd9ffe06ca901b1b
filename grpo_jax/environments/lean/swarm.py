"""Lists of moving entities for vectors: masks say which are there, and one scatter closes up several lists."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SLOTS = np.arange(100)
"""Of gymnax's lists."""
NOWHERE = np.iinfo(np.int32).max
"""A target out of all bounds."""
BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


class Swarm(NamedTuple):
    """Entities in the order of their appearance."""

    place: jax.Array
    """`[N]`: where it is, by `place_of`."""
    right: jax.Array
    """`[N]`: whether it moves to the right, 0 or 1."""
    timers: tuple[jax.Array, ...]
    """`[N]` each: of all but bullets the steps until it moves, of submarines those until it shoots."""
    there: jax.Array
    """`[N]`: which of them are there."""

    @classmethod
    def of(cls, rows: jax.Array, count: jax.Array, most: int = len(SLOTS)) -> "Swarm":
        """From gymnax's list, `[100, columns]`, of which no more than `most` are there."""
        x, y, right, *timers = rows[:most].T
        return cls(place_of(x, y), right, tuple(timers), SLOTS[:most] < count)

    @property
    def x(self) -> jax.Array:
        """`[N]`: the column, of those that are there."""
        return self.place & 15

    @property
    def y(self) -> jax.Array:
        """`[N]`: the row, of those that are there."""
        return self.place >> 4

    def appended(self, count: jax.Array, entity: "Swarm") -> "Swarm":
        """With one more entity after `count`, if it is there and there is room; its numbers get the list's type."""
        new = entity.there & (np.arange(len(self.there)) == count)
        return jax.tree.map(lambda theirs, ours: jnp.where(new, jnp.asarray(theirs, ours.dtype), ours), entity, self)

    def without(self, gone: jax.Array) -> "Swarm":
        """Without some; `gone` is `[N]`."""
        return self._replace(there=self.there & ~gone)

    def moved(self, interval: jax.Array | None = None) -> "Swarm":
        """After a move of those that are ready, of all without an interval; who leaves the board is gone."""
        ahead, timers = jnp.where(self.right != 0, 1, -1), self.timers
        if interval is not None:
            ready = timers[0] == 0
            ahead = jnp.where(ready, ahead, 0)
            timers = (jnp.where(ready, interval, jnp.maximum(timers[0] - 1, 0)), *timers[1:])
        x = self.x + ahead
        return Swarm(self.place + ahead, self.right, timers, self.there & (x >= 0) & (x < 10))


def place_of(x: jax.Array, y: jax.Array) -> jax.Array:
    """A column and a row from 0 to 9 in one number."""
    return 16 * y + x


def as_words(mask: jax.Array) -> jax.Array:
    """`[N]` to the bits of words of 32, `[ceil(N / 32)]`."""
    padded = jnp.pad(mask, (0, -len(mask) % 32)).reshape(-1, 32)
    return jnp.sum(jnp.where(padded, BITS[None], np.uint32(0)), axis=1, dtype=jnp.uint32)


def earlier(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[32 W]`, how many bits before each one are set, and how many are set in all.

    Elementwise after `as_words`, where a cumulative sum would be several launches on a GPU.
    """
    counts = list(jax.lax.population_count(words))
    word = np.arange(len(words))
    before = jax.lax.population_count(words[:, None] & (BITS - np.uint32(1))[None])
    for i, count in enumerate(counts[:-1]):
        before += jnp.where(word > i, count, np.uint32(0))[:, None]
    return before.ravel().astype(jnp.int32), sum(counts).astype(jnp.int32)


def closed_up(swarms: Sequence[Swarm]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Each list, `[100, columns]`, with those that are there, then zeros; and their numbers."""
    masks = [jnp.pad(swarm.there, (0, -len(swarm.there) % 32)) for swarm in swarms]  # each begins with a word
    words = jnp.split(as_words(jnp.concatenate(masks)), np.cumsum([len(mask) // 32 for mask in masks[:-1]]))
    before, counts = zip(*map(earlier, words), strict=True)
    columns, targets = [], []
    for swarm, rank in zip(swarms, before, strict=True):
        for column in (swarm.place + 256 * swarm.right, *swarm.timers):  # x, y and right in one number
            target = rank[: len(column)] + len(SLOTS) * len(columns)
            targets.append(jnp.where(swarm.there, target, NOWHERE))
            columns.append(column)
    closed = sums_at(jnp.concatenate(targets), jnp.concatenate(columns), len(SLOTS) * len(columns))
    rest = iter(closed.reshape(-1, len(SLOTS)))
    lists = []
    for swarm in swarms:
        packed, *timers = (next(rest) for _ in (swarm.place, *swarm.timers))
        lists.append(jnp.stack([packed & 15, packed >> 4 & 15, packed >> 8, *timers], axis=1))
    return lists, list(counts)


def sums_at(targets: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """`[size]`: at each place the sum of the values with this target; those of `size` and above are left out."""
    return jnp.zeros(size, jnp.int32).at[targets].add(values.astype(jnp.int32), mode="drop")
