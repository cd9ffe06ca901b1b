"""Seaquest-MinAtar for vectors.

gymnax removes entities from their lists of 100 after each phase of a step, with a scatter of rows. Here masks say which
entities are there, and one scatter closes up all lists at the end of the step; another draws the board.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.seaquest import EnvParams, EnvState, MinSeaquest

from grpo_jax.environments.lean import child, randint
from grpo_jax.environments.lean.swarm import NOWHERE, SLOTS, Swarm, as_words, closed_up, earlier, place_of, sums_at

LISTS = {
    "f_bullets": "f_bullet_count",
    "e_bullets": "e_bullet_count",
    "e_fish": "e_fish_count",
    "e_subs": "e_subs_count",
    "divers": "divers_count",
}
"""The lists of a state, and the fields with the number of their entities."""
MOST_SHOTS = 10
"""Of the player's bullets: one is fired in a step, and its tenth move takes it off the board."""


class Lean(MinSeaquest):
    """gymnax's Seaquest with all entities at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        subs, fish, divers, state = _spawn(key, state, params)
        bullets, state = _act(action, state, params)
        in_flight = bullets = bullets.moved()

        bullets, fish = _collide(bullets, fish)
        bullets, subs = _collide(bullets, subs)
        divers, state = _rescue(divers, state, params)

        met = _at_player(subs, state)
        subs = subs.moved(state.move_speed)
        met |= _at_player(subs, state)
        bullets, subs = _collide(bullets, subs)
        subs, enemy_bullets = _shoot(subs, state, params)
        hit = _at_player(enemy_bullets, state)
        enemy_bullets = enemy_bullets.moved()
        hit |= _at_player(enemy_bullets, state)
        met |= _at_player(fish, state)
        fish = fish.moved(state.move_speed)
        met |= _at_player(fish, state)
        bullets, fish = _collide(bullets, fish)

        swarms = bullets, enemy_bullets, fish, subs, divers
        lists, counts = closed_up(swarms)
        state = state.replace(**dict(zip(LISTS, lists, strict=True)), **dict(zip(LISTS.values(), counts, strict=True)))
        state, reward, suffocated = self._step_timers(state, params)
        state = state.replace(time=state.time + 1)
        done = self.is_terminal(state, params) | jnp.any(jnp.concatenate([met, hit])) | suffocated
        state = state.replace(terminal=done)
        reward += jnp.sum(in_flight.there & ~bullets.there).astype(jnp.float32)
        return _board(swarms, state, params), state, reward, done, {"discount": self.discount(state, params)}

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 10]`."""
        swarms = [Swarm.of(getattr(state, rows), getattr(state, count)) for rows, count in LISTS.items()]
        return _board(swarms, state, self.default_params if params is None else params)


def _board(swarms: Sequence[Swarm], state: EnvState, params: EnvParams) -> jax.Array:
    """The channels of the board, `[10, 10, 10]`, from the lists in the order of `LISTS`."""
    row, column = np.ogrid[:10, :10]
    bottom = row == 9
    behind = jnp.where(state.sub_or, state.sub_x - 1, state.sub_x + 1)
    behind = jnp.where(behind < 0, 9, behind)  # as an index of -1 is the last
    front, back = ((row == state.sub_y) & (column == x) for x in (state.sub_x, behind))
    oxygen = bottom & (column < jnp.maximum(state.oxygen, 0) * 10 // params.max_oxygen)
    rescued = bottom & (column >= 9 - state.diver_count) & (column < 9)

    trails = [swarm._replace(right=1 - swarm.right).moved() for swarm in swarms[2:]]  # of all but bullets
    drawn = [*enumerate(swarms), *((len(swarms), trail) for trail in trails)]
    cells = jnp.concatenate(
        [jnp.where(each.there, 100 * board + 10 * each.y + each.x, NOWHERE) for board, each in drawn]
    )
    boards = sums_at(cells, jnp.ones_like(cells), 100 * (len(swarms) + 1)).reshape(-1, 10, 10) != 0
    bullets, enemy_bullets, fish, subs, divers, trail = boards
    maps = [front, back, bullets, trail, enemy_bullets, fish, subs, oxygen, rescued, divers]
    return jnp.stack(maps, axis=-1).astype(jnp.float32)


def _spawn(key: jax.Array, state: EnvState, params: EnvParams) -> tuple[Swarm, Swarm, Swarm, EnvState]:
    """Submarines, fish and divers with those that appear."""
    key_enemy, key_diver = child(key, 0, 2), child(key, 1, 2)
    subs = Swarm.of(state.e_subs, state.e_subs_count)
    fish = Swarm.of(state.e_fish, state.e_fish_count)
    divers = Swarm.of(state.divers, state.divers_count)
    sub, one_fish = _new_enemy(key_enemy, subs, fish, state, params)
    diver = _new_diver(key_diver, state, params)
    state = state.replace(
        e_spawn_timer=jnp.where(state.e_spawn_timer == 0, state.e_spawn_speed, state.e_spawn_timer),
        d_spawn_timer=jnp.where(state.d_spawn_timer == 0, params.diver_spawn_speed, state.d_spawn_timer),
    )
    subs = subs.appended(state.e_subs_count, sub)
    fish = fish.appended(state.e_fish_count, one_fish)
    return subs, fish, divers.appended(state.divers_count, diver), state


def _new_enemy(key: jax.Array, subs: Swarm, fish: Swarm, state: EnvState, params: EnvParams) -> tuple[Swarm, Swarm]:
    """gymnax's draws of a submarine and of a fish, of which at most one is there: none against others of its row."""
    choice = jax.random.uniform(child(key, 0, 2), (2,))
    right, is_sub = choice[0] < 0.5, choice[1] < 1.0 / 3.0
    y = 1 + randint(child(key, 1, 2), (), 8)
    opposed = [each.there & (each.y == y) & (each.right != right) for each in (subs, fish)]
    appears = (state.e_spawn_timer == 0) & ~jnp.any(opposed[0] | opposed[1])
    timers = (state.move_speed, params.enemy_shot_interval)
    sub = Swarm(_entrance(right, y), right, timers, appears & is_sub)
    return sub, Swarm(sub.place, right, timers[:1], appears & ~is_sub)


def _new_diver(key: jax.Array, state: EnvState, params: EnvParams) -> Swarm:
    """gymnax's draws of a diver."""
    right = jax.random.bernoulli(child(key, 0, 2))
    y = 1 + randint(child(key, 1, 2), (), 8)
    return Swarm(_entrance(right, y), right, (params.diver_move_interval,), state.d_spawn_timer == 0)


def _entrance(right: jax.Array, y: jax.Array) -> jax.Array:
    """The place at the border from which it moves into the board."""
    return place_of(jnp.where(right, 0, 9), y)


def _act(action: jax.Array, state: EnvState, params: EnvParams) -> tuple[Swarm, EnvState]:
    """Moves, turns or fires; the player's bullets with a new one."""
    action = jnp.asarray(action)
    left, right = action == 1, action == 3
    x = jnp.clip(state.sub_x - left + right, 0, 9)
    y = jnp.clip(state.sub_y - (action == 2) + (action == 4), 0, 8)
    facing = (state.sub_or | right) & ~left
    fires = (action == 5) & (state.shot_timer == 0)
    bullets = Swarm.of(state.f_bullets, state.f_bullet_count, MOST_SHOTS)
    bullets = bullets.appended(state.f_bullet_count, Swarm(place_of(x, y), facing, (), fires))
    shot_timer = jnp.where(fires, params.shot_cool_down, state.shot_timer)
    return bullets, state.replace(sub_x=x, sub_y=y, sub_or=facing, shot_timer=shot_timer)


def _collide(bullets: Swarm, targets: Swarm) -> tuple[Swarm, Swarm]:
    """Both, without the player's bullets that hit and without the first target at each one's place.

    Bullets fly away from the player, who is no faster, so that no two of them are at one place.
    """
    together = (bullets.place[:, None] == targets.place[None]) & bullets.there[:, None] & targets.there[None]
    first = jnp.min(jnp.where(together, SLOTS[None], len(SLOTS)), axis=1)
    gone = jnp.any(first[:, None] == SLOTS[None], axis=0)
    return bullets.without(first < len(SLOTS)), targets.without(gone)


def _rescue(divers: Swarm, state: EnvState, params: EnvParams) -> tuple[Swarm, EnvState]:
    """Up to six divers come aboard: first those that are at the submarine, then those that arrive there by moving."""
    here = _at_player(divers, state)
    divers = divers.moved(params.diver_move_interval)
    both = jnp.concatenate([here, _at_player(divers, state) & ~here])
    before, number = earlier(as_words(both))
    room = jnp.maximum(6 - state.diver_count, 0)
    aboard = jnp.any((both & (before[: len(both)] < room)).reshape(2, -1), axis=0)
    return divers.without(aboard), state.replace(diver_count=state.diver_count + jnp.minimum(number, room))


def _at_player(swarm: Swarm, state: EnvState) -> jax.Array:
    """`[N]`: which are where the player's submarine is."""
    return swarm.there & (swarm.place == place_of(state.sub_x, state.sub_y))


def _shoot(subs: Swarm, state: EnvState, params: EnvParams) -> tuple[Swarm, Swarm]:
    """The submarines, and the enemies' bullets with those that they fire, as long as there is room."""
    move_timer, shot_timer = subs.timers
    shoots = subs.there & (shot_timer == 0)
    shot_timer = jnp.where(shoots, params.enemy_shot_interval, jnp.maximum(shot_timer - 1, 0))
    before, _ = earlier(as_words(shoots))
    fits = shoots & (before[: len(SLOTS)] < len(SLOTS) - state.e_bullet_count)
    bullets, new = Swarm.of(state.e_bullets, state.e_bullet_count), Swarm(subs.place, subs.right, (), fits)
    bullets = jax.tree.map(lambda *both: jnp.concatenate(both), bullets, new)
    return subs._replace(timers=(move_timer, shot_timer)), bullets
