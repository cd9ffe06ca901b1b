"""Seaquest-MinAtar for vectors.

gymnax removes entities from their lists of 100 after each phase of a step, with a scatter. Here a mask says which are
there, and each list is closed up once, at the end of the step, by comparing all places with all others.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.seaquest import EnvParams, EnvState, MinSeaquest

SLOTS = np.arange(100)
MOST_SHOTS = 16
"""Of the player's bullets: one is fired in a step, and in ten it has left the board."""


class Swarm(NamedTuple):
    """Entities in the order of their appearance.

    Columns of `rows` are x, y, whether it moves to the right, of all but bullets the steps until it moves, and of
    submarines the steps until it shoots.
    """

    rows: jax.Array  # [N, columns]
    there: jax.Array  # [N]

    def appended(self, count: jax.Array, row: jax.Array, enabled: jax.Array) -> "Swarm":
        """With one more entity after `count`, if there is room."""
        new = enabled & (np.arange(len(self.there)) == count)
        return Swarm(jnp.where(new[:, None], row[None], self.rows), self.there | new)

    def without(self, gone: jax.Array) -> "Swarm":
        """Without some; `gone` is `[N]`."""
        return Swarm(self.rows, self.there & ~gone)

    def moved(self, interval: jax.Array | None = None) -> "Swarm":
        """After a move of those that are ready, of all without an interval; who leaves the board is gone."""
        x, y, right, *rest = self.rows.T
        ahead = x + jnp.where(right != 0, 1, -1)
        if interval is not None:
            ready = rest[0] == 0
            ahead = jnp.where(ready, ahead, x)
            rest[0] = jnp.where(ready, interval, jnp.maximum(rest[0] - 1, 0))
        return Swarm(jnp.stack([ahead, y, right, *rest], axis=1), self.there & (ahead >= 0) & (ahead < 10))


def earlier(mask: jax.Array) -> jax.Array:
    """`[N]`: how many before each one are set."""
    slots = np.arange(len(mask))
    return jnp.sum(mask[:, None] & (slots[:, None] < slots), axis=0)


def number(mask: jax.Array, earlier: jax.Array) -> jax.Array:
    """How many are set, from how many are before each one."""
    return (mask[-1] + earlier[-1]).astype(jnp.int32)


def closed_up(swarm: Swarm) -> tuple[jax.Array, jax.Array]:
    """`[100, columns]`: those that are there, then zeros; and their number."""
    before = earlier(swarm.there)
    chosen = jnp.where(swarm.there, before, -1)[:, None] == SLOTS[None]
    rows = jnp.sum(jnp.where(chosen[..., None], swarm.rows[:, None], 0), axis=0, dtype=jnp.int32)
    return rows, number(swarm.there, before)


class ForVectors(MinSeaquest):
    """gymnax's Seaquest with all entities at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        subs, fish, divers, state = _spawn(key, state, params)
        shots, state = _act(action, state, params)

        shots, fish, killed_fish = _collide(shots.moved(), fish)
        shots, subs, killed_subs = _collide(shots, subs)
        divers, state = _rescue(divers, state)
        divers, state = _rescue(divers.moved(params.diver_move_interval), state)

        met = [_at_sub(subs, state)]
        subs = subs.moved(state.move_speed)
        met.append(_at_sub(subs, state))
        shots, subs, more_subs = _collide(shots, subs)
        subs, bullets = _shoot(subs, state, params)
        met.append(_at_sub(bullets, state))
        bullets = bullets.moved()
        met += [_at_sub(bullets, state), _at_sub(fish, state)]
        fish = fish.moved(state.move_speed)
        met.append(_at_sub(fish, state))
        shots, fish, more_fish = _collide(shots, fish)

        f_bullets, f_bullet_count = closed_up(shots)
        e_bullets, e_bullet_count = closed_up(bullets)
        e_fish, e_fish_count = closed_up(fish)
        e_subs, e_subs_count = closed_up(subs)
        divers, divers_count = closed_up(divers)
        state = state.replace(
            f_bullets=f_bullets,
            f_bullet_count=f_bullet_count,
            e_bullets=e_bullets,
            e_bullet_count=e_bullet_count,
            e_fish=e_fish,
            e_fish_count=e_fish_count,
            e_subs=e_subs,
            e_subs_count=e_subs_count,
            divers=divers,
            divers_count=divers_count,
        )
        state, reward, suffocated = self._step_timers(state, params)
        state = state.replace(time=state.time + 1)
        done = self.is_terminal(state, params) | jnp.any(jnp.concatenate(met)) | suffocated
        state = state.replace(terminal=done)
        reward += jnp.sum(jnp.stack([killed_fish, killed_subs, more_subs, more_fish])).astype(jnp.float32)
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

        lists = [state.f_bullets, state.e_bullets, state.e_fish, state.e_subs, state.divers]
        counts = [
            state.f_bullet_count,
            state.e_bullet_count,
            state.e_fish_count,
            state.e_subs_count,
            state.divers_count,
        ]
        x, y, right = jnp.stack([rows[:, :3] for rows in lists], axis=1).T[..., None, None]  # [5, 100, 1, 1] each
        there = (jnp.stack(counts)[:, None] > SLOTS[None])[..., None, None] & (y == row[None, None])
        shots, bullets, fish, subs, divers = jnp.any(there & (x == column[None, None]), axis=1)
        trails = jnp.any((there & (x - jnp.where(right != 0, 1, -1) == column[None, None]))[2:], axis=(0, 1))
        maps = [front, back, shots, trails, bullets, fish, subs, oxygen, rescued, divers]
        return jnp.stack(maps, axis=-1).astype(jnp.float32)


class Lean(ForVectors):
    """Seaquest for vectors where a launch costs more than arithmetic; on a CPU gymnax's own step, which is faster."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        return jax.lax.platform_dependent(
            key, state, action, params, cpu=functools.partial(MinSeaquest.step_env, self), default=super().step_env
        )

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 10]`."""
        return jax.lax.platform_dependent(
            state, params, cpu=functools.partial(MinSeaquest.get_obs, self), default=super().get_obs
        )


def _spawn(key: jax.Array, state: EnvState, params: EnvParams) -> tuple[Swarm, Swarm, Swarm, EnvState]:
    """Submarines, fish and divers with those that appear: gymnax's draws."""
    key_enemy, key_diver = jax.random.split(key)
    key_choice, key_y = jax.random.split(key_enemy)
    choice = jax.random.uniform(key_choice, (2,))
    right, is_sub = choice[0] < 0.5, choice[1] < 1.0 / 3.0
    y = jax.random.randint(key_y, (), 1, 9)
    subs, fish, divers = (
        Swarm(rows, SLOTS < count)
        for rows, count in (
            (state.e_subs, state.e_subs_count),
            (state.e_fish, state.e_fish_count),
            (state.divers, state.divers_count),
        )
    )
    opposed = [each.there & (each.rows[:, 1] == y) & (each.rows[:, 2] != right) for each in (subs, fish)]
    due = state.e_spawn_timer == 0
    appears = due & ~jnp.any(opposed[0] | opposed[1])
    enemy = jnp.stack([jnp.where(right, 0, 9), y, right.astype(int), state.move_speed, params.enemy_shot_interval])
    key_right, key_y = jax.random.split(key_diver)
    right = jax.random.bernoulli(key_right)
    y = jax.random.randint(key_y, (), 1, 9)
    diver = jnp.stack([jnp.where(right, 0, 9), y, right.astype(int), params.diver_move_interval])
    return (
        subs.appended(state.e_subs_count, enemy, appears & is_sub),
        fish.appended(state.e_fish_count, enemy[:4], appears & ~is_sub),
        divers.appended(state.divers_count, diver, state.d_spawn_timer == 0),
        state.replace(
            e_spawn_timer=jnp.where(due, state.e_spawn_speed, state.e_spawn_timer),
            d_spawn_timer=jnp.where(state.d_spawn_timer == 0, params.diver_spawn_speed, state.d_spawn_timer),
        ),
    )


def _act(action: jax.Array, state: EnvState, params: EnvParams) -> tuple[Swarm, EnvState]:
    """Moves, turns or fires; the player's bullets with a new one."""
    left, right = action == 1, action == 3
    x = jnp.clip(state.sub_x - left + right, 0, 9)
    y = jnp.clip(state.sub_y - (action == 2) + (action == 4), 0, 8)
    facing = (state.sub_or | right) & ~left
    fires = (action == 5) & (state.shot_timer == 0)
    shots = Swarm(state.f_bullets[:MOST_SHOTS], SLOTS[:MOST_SHOTS] < state.f_bullet_count)
    return shots.appended(state.f_bullet_count, jnp.stack([x, y, facing.astype(int)]), fires), state.replace(
        sub_x=x, sub_y=y, sub_or=facing, shot_timer=jnp.where(fires, params.shot_cool_down, state.shot_timer)
    )


def _collide(shots: Swarm, targets: Swarm) -> tuple[Swarm, Swarm, jax.Array]:
    """Without the bullets and targets that meet, the first target of a place and the last bullet; and which bullets."""
    first = jnp.min(jnp.where(_together(shots, targets), SLOTS[None], len(SLOTS)), axis=1)
    slots = SLOTS[:MOST_SHOTS]
    later = jnp.any(_together(shots, shots) & (slots > slots[:, None]), axis=1)
    hits = (first < len(SLOTS)) & ~later
    gone = jnp.any(hits[:, None] & (first[:, None] == SLOTS[None]), axis=0)
    return shots.without(hits), targets.without(gone), hits


def _together(swarm: Swarm, other: Swarm) -> jax.Array:
    """`[N, M]`: which are at the same place."""
    places = jnp.all(swarm.rows[:, None, :2] == other.rows[None, :, :2], axis=-1)
    return places & swarm.there[:, None] & other.there[None]


def _rescue(divers: Swarm, state: EnvState) -> tuple[Swarm, EnvState]:
    """Divers at the submarine come aboard, up to six."""
    here = _at_sub(divers, state)
    before, room = earlier(here), jnp.maximum(6 - state.diver_count, 0)
    aboard = state.diver_count + jnp.minimum(number(here, before), room)
    return divers.without(here & (before < room)), state.replace(diver_count=aboard)


def _at_sub(swarm: Swarm, state: EnvState) -> jax.Array:
    """`[N]`: which are where the player's submarine is."""
    return swarm.there & (swarm.rows[:, 0] == state.sub_x) & (swarm.rows[:, 1] == state.sub_y)


def _shoot(subs: Swarm, state: EnvState, params: EnvParams) -> tuple[Swarm, Swarm]:
    """The submarines, and the enemies' bullets with those that they fire, as long as there is room."""
    *others, timer = subs.rows.T
    shoots = subs.there & (timer == 0)
    timer = jnp.where(shoots, params.enemy_shot_interval, jnp.maximum(timer - 1, 0))
    fits = shoots & (earlier(shoots) < 100 - state.e_bullet_count)
    rows = jnp.concatenate([state.e_bullets, subs.rows[:, :3]])
    bullets = Swarm(rows, jnp.concatenate([SLOTS < state.e_bullet_count, fits]))
    return Swarm(jnp.stack([*others, timer], axis=1), subs.there), bullets
