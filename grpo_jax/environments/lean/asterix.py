"""Asterix-MinAtar for vectors.

An entity is five numbers: x, y, moves to the right, is gold, is there. That of slot i is in row i + 1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.asterix import EnvParams, EnvState, MinAsterix, step_agent, step_timers

from grpo_jax.environments.lean.draws import child, randint

SLOTS = np.arange(8)


class Lean(MinAsterix):
    """gymnax's Asterix with all entities at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        spawns = state.spawn_timer == 0
        slot, entity = _new_entity(key, state.entities[:, 4] != 0)
        entities = jnp.where(spawns & (SLOTS == slot)[:, None], entity[None], state.entities)
        timer = jnp.where(spawns, state.spawn_speed, state.spawn_timer)
        state = step_agent(state.replace(entities=entities, spawn_timer=timer), action)
        entities, reward, hits = _meet(state.entities, state)

        moves = state.move_timer == 0
        x, filled = entities[:, 0], entities[:, 4] != 0
        x = jnp.where(filled, x + 2 * entities[:, 2] - 1, x)
        moved, moved_reward, moved_hits = _meet(jnp.concatenate([x[:, None], entities[:, 1:]], axis=1), state)
        moved = moved * (filled & (x >= 0) & (x <= 9))[:, None]
        state = state.replace(
            entities=jnp.where(moves, moved, entities),
            move_timer=jnp.where(moves, state.move_speed, state.move_timer),
        )
        reward = reward + moves * moved_reward
        terminal = hits + moves * moved_hits > 0

        state = step_timers(state, params).replace(time=state.time + 1, terminal=terminal)
        done = self.is_terminal(state, params)
        info = {"discount": self.discount(state, params)}
        return self.get_obs(state), state, reward.astype(jnp.float32), done, info

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 4]`."""
        x, _, right, gold, filled = jnp.pad(state.entities, ((1, 1), (0, 0))).T[:, :, None]  # [10 rows, 1] each
        row, column = np.ogrid[:10, :10]
        here, trail = (filled != 0) & (x == column), (filled != 0) & (x - 2 * right + 1 == column)
        player = (row == state.player_y) & (column == state.player_x)
        return jnp.stack([player, here & (gold == 0), trail, here & (gold != 0)], axis=-1).astype(jnp.float32)


def _new_entity(key: jax.Array, filled: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The slot of a new entity, and the entity: gymnax's draws.

    gymnax puts the slots into a random order and takes the first free one from the second place on, else the last.
    """
    key_right, key_gold, key_slot = (child(key, i) for i in range(3))
    right = 1 - randint(key_right, (), 2)
    odds = jnp.cumsum(jnp.array([1 / 3, 2 / 3]))  # as jax.random.choice computes it, without its search
    gold = 1 - jnp.sum(odds < odds[-1] * (1 - jax.random.uniform(key_gold)))
    bits = jax.random.bits(child(key_slot, 1), (8,), jnp.uint32)
    place = sum((other < bits) | ((other == bits) & (i < SLOTS)) for i, other in enumerate(bits))
    taken = functools.reduce(jnp.minimum, jnp.where(~filled & (place >= 1), place, 7))
    chosen = place == taken
    slot = sum(chosen * SLOTS)
    return slot, jnp.stack([(1 - right) * 9, slot + 1, right, gold, sum(chosen & ~filled)])


def _meet(entities: jax.Array, state: EnvState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The entities without the gold at the player's place, how much gold that is, and how many enemies are there."""
    x, y, _, gold, filled = entities.T
    here = (x == state.player_x) & (y == state.player_y) & (filled != 0)
    found = here & (gold != 0)
    return entities * ~found[:, None], sum(found), sum(here & (gold == 0))
