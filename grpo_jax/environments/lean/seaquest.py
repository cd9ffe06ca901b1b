"""Seaquest-MinAtar for vectors.

gymnax removes entities from their lists of 100 after each phase of a step, with a scatter of rows. Here masks say which
entities are there, and one scatter closes up all lists at the end of the step.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.seaquest import EnvParams, EnvState, MinSeaquest

from grpo_jax.environments.lean.draws import child, randint

SLOTS = np.arange(100)
LISTS = {
    "f_bullets": "f_bullet_count",
    "e_bullets": "e_bullet_count",
    "e_fish": "e_fish_count",
    "e_subs": "e_subs_count",
    "divers": "divers_count",
}
"""The lists of a state, and the fields with the number of their entities."""
MOST_SHOTS = 12
"""Of the player's bullets: one is fired in a step, and in ten it has left the board."""
NOWHERE = 1000
"""An index out of all bounds, which scatters drop."""
BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)


class Swarm(NamedTuple):
    """Entities in the order of their appearance."""

    place: jax.Array
    """`[N]`: 16 y + x."""
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
        return cls(16 * y + x, right, tuple(timers), SLOTS[:most] < count)

    def appended(self, count: jax.Array, entity: "Swarm") -> "Swarm":
        """With one more entity after `count`, if it is there and there is room."""
        new = entity.there & (np.arange(len(self.there)) == count)
        return jax.tree.map(lambda theirs, ours: jnp.where(new, theirs, ours), entity, self)

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
        x = (self.place & 15) + ahead
        return Swarm(self.place + ahead, self.right, timers, self.there & (x >= 0) & (x < 10))


def as_words(mask: jax.Array) -> jax.Array:
    """`[N]` to the bits of words of 32, `[ceil(N / 32)]`."""
    padded = jnp.pad(mask, (0, -len(mask) % 32)).reshape(-1, 32)
    return jnp.sum(jnp.where(padded, BIT[None], np.uint32(0)), axis=1, dtype=jnp.uint32)


def earlier(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[32 W]`, how many bits before each one are set, and how many are set in all."""
    counts = list(jax.lax.population_count(words))
    word = np.arange(len(words))
    before = jax.lax.population_count(words[:, None] & (BIT - np.uint32(1))[None])
    for i, count in enumerate(counts[:-1]):
        before += jnp.where(word > i, count, np.uint32(0))[:, None]
    return before.ravel().astype(jnp.int32), sum(counts).astype(jnp.int32)


def closed_up(*swarms: Swarm) -> tuple[list[jax.Array], list[jax.Array]]:
    """Each list, `[100, columns]`, with those that are there, then zeros; and their numbers."""
    masks = [jnp.pad(swarm.there, (0, -len(swarm.there) % 32)) for swarm in swarms]
    words = jnp.split(as_words(jnp.concatenate(masks)), np.cumsum([len(mask) // 32 for mask in masks[:-1]]))
    before, counts = zip(*map(earlier, words), strict=True)
    columns, targets = [], []
    for swarm, rank in zip(swarms, before, strict=True):
        for column in (swarm.place + 256 * swarm.right, *swarm.timers):
            target = rank[: len(column)] + len(SLOTS) * len(columns)
            targets.append(jnp.where(swarm.there, target, NOWHERE))
            columns.append(column)
    closed = sums_at(jnp.concatenate(targets), jnp.concatenate(columns), len(SLOTS) * len(columns))
    rows = iter(closed.reshape(-1, len(SLOTS)))
    lists = [jnp.stack([*_unpacked(next(rows)), *(next(rows) for _ in swarm.timers)], axis=1) for swarm in swarms]
    return lists, list(counts)


def sums_at(targets: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """`[size]`: at each place the sum of the values with this target; targets out of bounds are left out."""
    scatter, compare = (functools.partial(function, size=size) for function in (by_scatter, by_comparison))
    return jax.lax.platform_dependent(targets, values.astype(jnp.int32), tpu=compare, default=scatter)


def by_scatter(targets: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """One operation, for CPUs and GPUs."""
    return jnp.zeros(size, jnp.int32).at[targets].add(values, mode="drop")


def by_comparison(targets: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """More arithmetic, for a TPU, which scatters one value after the other."""
    return jnp.sum(jnp.where(targets[:, None] == np.arange(size)[None], values[:, None], 0), axis=0, dtype=jnp.int32)


def _unpacked(column: jax.Array) -> tuple[jax.Array, ...]:
    """x, y and whether it moves to the right."""
    return column & 15, column >> 4 & 15, column >> 8


class Lean(MinSeaquest):
    """gymnax's Seaquest with all entities at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        subs, fish, divers, state = _spawn(key, state, params)
        shots, state = _act(action, state, params)
        fired = shots = shots.moved()

        shots, fish = _collide(shots, fish)
        shots, subs = _collide(shots, subs)
        divers, state = _rescue(divers, state, params)

        met = _at_sub(subs, state)
        subs = subs.moved(state.move_speed)
        met |= _at_sub(subs, state)
        shots, subs = _collide(shots, subs)
        subs, bullets = _shoot(subs, state, params)
        shot = _at_sub(bullets, state)
        bullets = bullets.moved()
        shot |= _at_sub(bullets, state)
        met |= _at_sub(fish, state)
        fish = fish.moved(state.move_speed)
        met |= _at_sub(fish, state)
        shots, fish = _collide(shots, fish)

        swarms = shots, bullets, fish, subs, divers
        lists, counts = closed_up(*swarms)
        state = state.replace(**dict(zip(LISTS, lists, strict=True)), **dict(zip(LISTS.values(), counts, strict=True)))
        state, reward, suffocated = self._step_timers(state, params)
        state = state.replace(time=state.time + 1)
        done = self.is_terminal(state, params) | jnp.any(jnp.concatenate([met, shot])) | suffocated
        state = state.replace(terminal=done)
        reward += jnp.sum(fired.there & ~shots.there).astype(jnp.float32)
        return _board(swarms, state, params), state, reward, done, {"discount": self.discount(state, params)}

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 10]`."""
        swarms = [Swarm.of(getattr(state, rows), getattr(state, count)) for rows, count in LISTS.items()]
        return _board(swarms, state, params or self.default_params)


def _board(swarms: Sequence[Swarm], state: EnvState, params: EnvParams) -> jax.Array:
    """The channels of the board, `[10, 10, 10]`, from the lists in the order of `LISTS`."""
    row, column = np.ogrid[:10, :10]
    bottom = row == 9
    behind = jnp.where(state.sub_or, state.sub_x - 1, state.sub_x + 1)
    behind = jnp.where(behind < 0, 9, behind)  # as an index of -1 is the last
    front, back = ((row == state.sub_y) & (column == x) for x in (state.sub_x, behind))
    oxygen = bottom & (column < jnp.maximum(state.oxygen, 0) * 10 // params.max_oxygen)
    rescued = bottom & (column >= 9 - state.diver_count) & (column < 9)

    behind = [each._replace(right=1 - each.right).moved() for each in swarms[2:]]
    cells = [
        jnp.where(each.there, 100 * board + 10 * (each.place >> 4) + (each.place & 15), NOWHERE)
        for board, each in [*enumerate(swarms), *((5, each) for each in behind)]
    ]
    cells = jnp.concatenate(cells)
    drawn = sums_at(cells, jnp.ones_like(cells), 600) != 0
    shots, bullets, fish, subs, divers, trails = drawn.reshape(6, 10, 10)
    maps = [front, back, shots, trails, bullets, fish, subs, oxygen, rescued, divers]
    return jnp.stack(maps, axis=-1).astype(jnp.float32)


def _spawn(key: jax.Array, state: EnvState, params: EnvParams) -> tuple[Swarm, Swarm, Swarm, EnvState]:
    """Submarines, fish and divers with those that appear: gymnax's draws."""
    key_enemy, key_diver = child(key, 0, 2), child(key, 1, 2)
    subs = Swarm.of(state.e_subs, state.e_subs_count)
    fish = Swarm.of(state.e_fish, state.e_fish_count)
    divers = Swarm.of(state.divers, state.divers_count)

    choice = jax.random.uniform(child(key_enemy, 0, 2), (2,))
    right, is_sub = choice[0] < 0.5, choice[1] < 1.0 / 3.0
    y = 1 + randint(child(key_enemy, 1, 2), (), 8)
    opposed = [each.there & (each.place >> 4 == y) & (each.right != right) for each in (subs, fish)]
    due = state.e_spawn_timer == 0
    appears = due & ~jnp.any(opposed[0] | opposed[1])
    sub = Swarm(
        _entrance(right, y), right.astype(int), (state.move_speed, params.enemy_shot_interval), appears & is_sub
    )
    one_fish = Swarm(sub.place, sub.right, sub.timers[:1], appears & ~is_sub)

    right = jax.random.bernoulli(child(key_diver, 0, 2))
    y = 1 + randint(child(key_diver, 1, 2), (), 8)
    dives = state.d_spawn_timer == 0
    diver = Swarm(_entrance(right, y), right.astype(int), (params.diver_move_interval,), dives)
    return (
        subs.appended(state.e_subs_count, sub),
        fish.appended(state.e_fish_count, one_fish),
        divers.appended(state.divers_count, diver),
        state.replace(
            e_spawn_timer=jnp.where(due, state.e_spawn_speed, state.e_spawn_timer),
            d_spawn_timer=jnp.where(dives, params.diver_spawn_speed, state.d_spawn_timer),
        ),
    )


def _entrance(right: jax.Array, y: jax.Array) -> jax.Array:
    return 16 * y + jnp.where(right, 0, 9)


def _act(action: jax.Array, state: EnvState, params: EnvParams) -> tuple[Swarm, EnvState]:
    """Moves, turns or fires; the player's bullets with a new one."""
    left, right = action == 1, action == 3
    x = jnp.clip(state.sub_x - left + right, 0, 9)
    y = jnp.clip(state.sub_y - (action == 2) + (action == 4), 0, 8)
    facing = (state.sub_or | right) & ~left
    fires = (action == 5) & (state.shot_timer == 0)
    shots = Swarm.of(state.f_bullets, state.f_bullet_count, MOST_SHOTS)
    return shots.appended(state.f_bullet_count, Swarm(16 * y + x, facing.astype(int), (), fires)), state.replace(
        sub_x=x, sub_y=y, sub_or=facing, shot_timer=jnp.where(fires, params.shot_cool_down, state.shot_timer)
    )


def _collide(shots: Swarm, targets: Swarm) -> tuple[Swarm, Swarm]:
    """Without the bullets that hit, and the first target at the place of each.

    The player cannot overtake its bullets, so that no two of them are at one place.
    """
    together = (shots.place[:, None] == targets.place[None]) & shots.there[:, None] & targets.there[None]
    first = jnp.min(jnp.where(together, SLOTS[None], len(SLOTS)), axis=1)
    gone = jnp.any(first[:, None] == SLOTS[None], axis=0)
    return shots.without(first < len(SLOTS)), targets.without(gone)


def _rescue(divers: Swarm, state: EnvState, params: EnvParams) -> tuple[Swarm, EnvState]:
    """Up to six divers come aboard: first those that are at the submarine, then those that arrive there by moving."""
    here = _at_sub(divers, state)
    divers = divers.moved(params.diver_move_interval)
    both = jnp.concatenate([here, _at_sub(divers, state) & ~here])
    before, number = earlier(as_words(both))
    room = jnp.maximum(6 - state.diver_count, 0)
    aboard = jnp.any((both & (before[: len(both)] < room)).reshape(2, -1), axis=0)
    return divers.without(aboard), state.replace(diver_count=state.diver_count + jnp.minimum(number, room))


def _at_sub(swarm: Swarm, state: EnvState) -> jax.Array:
    """`[N]`: which are where the player's submarine is."""
    return swarm.there & (swarm.place == 16 * state.sub_y + state.sub_x)


def _shoot(subs: Swarm, state: EnvState, params: EnvParams) -> tuple[Swarm, Swarm]:
    """The submarines, and the enemies' bullets with those that they fire, as long as there is room."""
    move, shot = subs.timers
    shoots = subs.there & (shot == 0)
    shot = jnp.where(shoots, params.enemy_shot_interval, jnp.maximum(shot - 1, 0))
    before, _ = earlier(as_words(shoots))
    fits = shoots & (before[: len(SLOTS)] < len(SLOTS) - state.e_bullet_count)
    bullets, new = Swarm.of(state.e_bullets, state.e_bullet_count), Swarm(subs.place, subs.right, (), fits)
    return subs._replace(timers=(move, shot)), jax.tree.map(lambda *both: jnp.concatenate(both), bullets, new)
