"""Seaquest-MinAtar for vectors.

gymnax removes entities from their lists of 100 after each phase of a step, with a scatter. Here a mask says which are
there, and all lists are closed up at the end of the step, by comparing all places with all others.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.seaquest import EnvParams, EnvState, MinSeaquest

SLOTS = np.arange(100)
MOST_SHOTS = 12
"""Of the player's bullets: one is fired in a step, and in ten it has left the board. (Not 16: see `asterix`.)"""
FISH, SUBS, DIVERS = range(3)


class Entities(NamedTuple):
    """Entities in the order of their appearance, each `[..., N]`."""

    x: jax.Array
    y: jax.Array
    right: jax.Array  # whether it moves to the right
    there: jax.Array

    def at(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """`[..., N]`: which are at a place."""
        return self.there & (self.x == x) & (self.y == y)

    def moved(self, ready: jax.Array | bool = True) -> "Entities":
        """After a move of those that are ready; who leaves the board is gone."""
        x = self.x + jnp.where(ready, jnp.where(self.right != 0, 1, -1), 0)
        return self._replace(x=x, there=self.there & (x >= 0) & (x < 10))

    def without(self, gone: jax.Array) -> "Entities":
        """Without some; `gone` is `[..., N]`."""
        return self._replace(there=self.there & ~gone)


def _place(x: jax.Array, y: jax.Array, right: jax.Array) -> jax.Array:
    """One number for a place on the board and a direction."""
    return x + 16 * y + 256 * right


def earlier(mask: jax.Array) -> jax.Array:
    """`[K, N]`: how many before each one are set."""
    slots = np.arange(mask.shape[1])
    return jnp.sum(mask[:, :, None] & (slots[:, None] < slots)[None], axis=1, dtype=jnp.int32)


class ForVectors(MinSeaquest):
    """gymnax's Seaquest with all entities at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        swarms, timer, shot_timer, state = _spawn(key, state, params)
        shots, state = _act(action, state, params)
        x, y, alive = state.sub_x, state.sub_y, shots.there
        shots, swarms = _collide(shots, swarms, (FISH, SUBS))
        ready, before = timer == 0, swarms.at(x, y)
        interval = jnp.stack([state.move_speed, state.move_speed, params.diver_move_interval])[:, None]
        timer = jnp.where(ready, interval, jnp.maximum(timer - 1, 0))
        swarms = swarms.moved(ready)
        after = swarms.at(x, y)
        rescued, state = _rescue(before[DIVERS], after[DIVERS], state)
        swarms = swarms.without(jnp.stack([jnp.zeros(100, bool), jnp.zeros(100, bool), rescued]))
        shots, swarms = _collide(shots, swarms, (SUBS, FISH))

        shoots = swarms.there[SUBS] & (shot_timer == 0)
        shot_timer = jnp.where(shoots, params.enemy_shot_interval, jnp.maximum(shot_timer - 1, 0))
        fired = Entities(swarms.x[SUBS], swarms.y[SUBS], swarms.right[SUBS], shoots)
        bullets = Entities(*state.e_bullets.T, SLOTS < state.e_bullet_count)
        arriving, flying = bullets.moved(), fired.moved()
        firing, *places = earlier(jnp.stack([shoots, *swarms.there, arriving.there, flying.there]))
        no_room = firing >= 100 - state.e_bullet_count
        fired, flying = fired.without(no_room), flying.without(no_room)
        met = [*before[:DIVERS], *after[:DIVERS], *(each.at(x, y) for each in (bullets, arriving, fired, flying))]
        met = jnp.any(functools.reduce(jnp.logical_or, met))
        state = state.replace(**_closed_up(shots, swarms, (timer, shot_timer), arriving, flying, places))
        state, reward, suffocated = self._step_timers(state, params)
        state = state.replace(time=state.time + 1)
        done = self.is_terminal(state, params) | met | suffocated
        state = state.replace(terminal=done)
        reward += jnp.sum(alive & ~shots.there).astype(jnp.float32)
        return self.get_obs(state, params), state, reward, done, {"discount": self.discount(state, params)}

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 10]`."""
        row, column = np.ogrid[:10, :10]
        bottom = row == 9
        behind = jnp.where(state.sub_or, state.sub_x - 1, state.sub_x + 1)
        behind = jnp.where(behind < 0, 9, behind)  # as an index of -1 is the last
        front, back = ((row == state.sub_y) & (column == x) for x in (state.sub_x, behind))
        limit = self.default_params.max_oxygen if params is None else params.max_oxygen
        oxygen = bottom & (column < jnp.maximum(state.oxygen, 0) * 10 // limit)
        rescued = bottom & (column >= 9 - state.diver_count) & (column < 9)

        shots, bullets = (state.f_bullets, state.f_bullet_count), (state.e_bullets, state.e_bullet_count)
        fish, subs = (state.e_fish, state.e_fish_count), (state.e_subs, state.e_subs_count)
        lists, counts = zip(shots, bullets, fish, subs, (state.divers, state.divers_count), strict=True)
        there, places = jnp.stack(counts)[:, None] > SLOTS[None], [_place(*rows[:, :3].T) for rows in lists]
        places = jnp.where(there, jnp.stack(places), -1)[..., None, None]
        x, y, behind = places & 15, places >> 4 & 15, jnp.where(places & 256 != 0, -1, 1)
        here, trail = ((y == row[None, None]) & (each == column[None, None]) for each in (x, x + behind))
        seen = jax.lax.reduce(here + 2 * trail, np.int32(0), jax.lax.bitwise_or, (1,))
        shots, bullets, fish, subs, divers = seen & 1 != 0
        trails = (seen[2] | seen[3] | seen[4]) & 2 != 0
        maps = [front, back, shots, trails, bullets, fish, subs, oxygen, rescued, divers]
        return jnp.stack(maps, axis=-1).astype(jnp.float32)


class Lean(ForVectors):
    """Seaquest for vectors where a launch costs more than arithmetic; on a CPU gymnax's own step, which is faster."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        return jax.lax.platform_dependent(
            key, state, action, params, cpu=functools.partial(MinSeaquest.step_env, self), default=super().step_env
        )


def _spawn(key: jax.Array, state: EnvState, params: EnvParams) -> tuple[Entities, jax.Array, jax.Array, EnvState]:
    """Fish, submarines and divers with those that appear, their timers, and those of shots: gymnax's draws."""
    key_enemy, key_diver = jax.random.split(key)
    key_choice, key_y = jax.random.split(key_enemy)
    choice = jax.random.uniform(key_choice, (2,))
    right, is_sub = choice[0] < 0.5, choice[1] < 1.0 / 3.0
    y = jax.random.randint(key_y, (), 1, 9)
    key_right, key_y = jax.random.split(key_diver)
    rights = jnp.stack([right, right, jax.random.bernoulli(key_right)])[:, None]
    ys = jnp.stack([y, y, jax.random.randint(key_y, (), 1, 9)])[:, None]

    lists = state.e_fish, state.e_subs, state.divers
    counts = jnp.stack([state.e_fish_count, state.e_subs_count, state.divers_count])[:, None]
    there = SLOTS[None] < counts
    old_x, old_y, old_right, timer = (jnp.stack([rows[:, i] for rows in lists]) for i in range(4))
    opposed = there & (old_y == ys) & (old_right != rights)
    due, diver_due = state.e_spawn_timer == 0, state.d_spawn_timer == 0
    appears = due & ~jnp.any(opposed[FISH] | opposed[SUBS])
    enabled = jnp.stack([appears & ~is_sub, appears & is_sub, diver_due])[:, None]
    new = enabled & (SLOTS[None] == counts)
    interval = jnp.stack([state.move_speed, state.move_speed, params.diver_move_interval])[:, None]
    swarms = Entities(
        x=jnp.where(new, jnp.where(rights, 0, 9), old_x),
        y=jnp.where(new, ys, old_y),
        right=jnp.where(new, rights.astype(int), old_right),
        there=there | new,
    )
    shot_timer = jnp.where(new[SUBS], params.enemy_shot_interval, state.e_subs[:, 4])
    return (
        swarms,
        jnp.where(new, interval, timer),
        shot_timer,
        state.replace(
            e_spawn_timer=jnp.where(due, state.e_spawn_speed, state.e_spawn_timer),
            d_spawn_timer=jnp.where(diver_due, params.diver_spawn_speed, state.d_spawn_timer),
        ),
    )


def _act(action: jax.Array, state: EnvState, params: EnvParams) -> tuple[Entities, EnvState]:
    """Moves, turns or fires; the player's bullets with a new one, after their move."""
    left, right = action == 1, action == 3
    x = jnp.clip(state.sub_x - left + right, 0, 9)
    y = jnp.clip(state.sub_y - (action == 2) + (action == 4), 0, 8)
    facing = (state.sub_or | right) & ~left
    fires = (action == 5) & (state.shot_timer == 0)
    slots = SLOTS[:MOST_SHOTS]
    new = fires & (slots == state.f_bullet_count)
    old_x, old_y, old_right = state.f_bullets[:MOST_SHOTS].T
    shots = Entities(
        x=jnp.where(new, x, old_x),
        y=jnp.where(new, y, old_y),
        right=jnp.where(new, facing.astype(int), old_right),
        there=(slots < state.f_bullet_count) | new,
    )
    return shots.moved(), state.replace(
        sub_x=x, sub_y=y, sub_or=facing, shot_timer=jnp.where(fires, params.shot_cool_down, state.shot_timer)
    )


def _collide(shots: Entities, swarms: Entities, order: tuple[int, int]) -> tuple[Entities, Entities]:
    """Without the bullets and entities that meet, the first entity of a place and the last bullet, one kind by one."""
    slots = SLOTS[:MOST_SHOTS]
    later = (slots[:, None] > slots) & (shots.x[:, None] == shots.x[None]) & (shots.y[:, None] == shots.y[None])
    enemies = Entities(*(column[:DIVERS, None] for column in swarms))  # [2, 1, 100]
    hit = enemies.at(shots.x[None, :, None], shots.y[None, :, None])
    first = jnp.min(jnp.where(hit, SLOTS[None, None], 100), axis=2)
    gone = [jnp.zeros(100, bool)] * 3
    for kind in order:
        hits = shots.there & (first[kind] < 100) & ~jnp.any(later & shots.there[:, None], axis=0)
        gone[kind] = jnp.any(hits[:, None] & (first[kind][:, None] == SLOTS[None]), axis=0)
        shots = shots.without(hits)
    return shots, swarms.without(jnp.stack(gone))


def _rescue(before: jax.Array, after: jax.Array, state: EnvState) -> tuple[jax.Array, EnvState]:
    """`[100]`: the divers that come aboard, up to six, of those at the submarine before and after their move.

    If one of the first does not come aboard, there is no room left for the second.
    """
    met = jnp.stack([before, after & ~before])
    places = earlier(met)
    first, second = places[:, -1] + met[:, -1]
    room = jnp.maximum(6 - state.diver_count, 0)
    left = jnp.maximum(room - first, 0)
    rescued = met & (places < jnp.stack([room, left])[:, None])
    aboard = state.diver_count + jnp.minimum(first, room) + jnp.minimum(second, left)
    return rescued[0] | rescued[1], state.replace(diver_count=aboard)


def _closed_up(
    shots: Entities, swarms: Entities, timers: tuple, bullets: Entities, fired: Entities, places: list[jax.Array]
) -> dict[str, jax.Array]:
    """The lists of a state without gaps, and their lengths.

    `timers` are those of the swarms' moves, `[3, 100]`, and of the submarines' shots; `fired` come after `bullets`;
    `places` say how many of the swarms, of bullets and of fired are before each one.
    """
    places = jnp.stack(places)
    num_swarms = places[:3, -1] + swarms.there[:, -1]
    num_bullets = jnp.sum(bullets.there)
    there = jnp.stack([*swarms.there, bullets.there, fired.there])
    slots = jnp.where(there, places + jnp.stack([0, 0, 0, 0, num_bullets])[:, None], -1)

    def closed(*column):
        chosen = slots[:, :, None] == SLOTS[None, None]
        return jnp.sum(jnp.where(chosen, jnp.stack(column)[:, :, None], 0), axis=1, dtype=jnp.int32)

    (timer, shot_timer), zeros = timers, jnp.zeros(100, jnp.int32)
    place = closed(*_place(*swarms[:3]), _place(*bullets[:3]), _place(*fired[:3]))
    timer, shot_timer = closed(*timer, zeros, zeros), closed(zeros, shot_timer, zeros, zeros, zeros)
    place = place[:4] + jnp.stack([zeros, zeros, zeros, place[4]])
    fish, subs, divers, both = jnp.stack([place & 15, place >> 4 & 15, place >> 8, timer[:4]], axis=-1)
    own = jnp.where(shots.there, earlier(shots.there[None])[0], -1)[:, None, None] == SLOTS[None, :, None]
    own = jnp.sum(jnp.where(own, jnp.stack(shots[:3], axis=1)[:, None], 0), axis=0, dtype=jnp.int32)
    return {
        "f_bullets": own,
        "f_bullet_count": jnp.sum(shots.there, dtype=jnp.int32),
        "e_bullets": both[:, :3],
        "e_bullet_count": (num_bullets + jnp.sum(fired.there)).astype(jnp.int32),
        "e_fish": fish,
        "e_fish_count": num_swarms[FISH],
        "e_subs": jnp.concatenate([subs, shot_timer[SUBS, :, None]], axis=1),
        "e_subs_count": num_swarms[SUBS],
        "divers": divers,
        "divers_count": num_swarms[DIVERS],
    }
