"""The lean step of Asterix-MinAtar, written for vectors: gymnax's bits from the same keys, in fewer kernels.

gymnax moves the entities one after the other, with a scatter each, and looks for a free place in a loop whose length
depends on the state. On a GPU each scatter is a launch of its own, and such a loop waits for the host. Here all
entities are compared at once: no loops, no sorts, no scatters. `tests/environments/test_lean.py` plays both side by
side, and counts these operations. Actions are those of the space: others, which gymnax clamps or wraps, may have other
effects.

`Config("Asterix-MinAtar")` takes it; gymnax's own step is `Config(gymnax.make("Asterix-MinAtar")[0])`.

Each of the ten rows of the board but the first and the last has one entity, here a number: four bits each of x and y,
and whether it moves to the right, is gold, and is there. XLA fuses sums over ten rows with what is around them, but not
over the eight slots of the state: for powers of two it has kernels of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.asterix import EnvParams, EnvState, MinAsterix, step_agent, step_timers

ROW = np.arange(10)
SHIFTS, MASKS = np.array([0, 4, 8, 9, 10]), np.array([15, 15, 1, 1, 1])
RIGHT, GOLD, THERE = 1 << SHIFTS[2:]


class Lean(MinAsterix):
    """gymnax's Asterix with all entities at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        rows, spawns = _packed(state.entities), state.spawn_timer == 0
        rows = _spawned(key, rows, spawns)
        timer = jnp.where(spawns, state.spawn_speed, state.spawn_timer)
        state = step_agent(state.replace(spawn_timer=timer), action)
        rows, met = _meet(rows, rows & 15, state)

        moves = state.move_timer == 0
        there, x = rows & THERE != 0, (rows & 15) + jnp.where(rows & RIGHT != 0, 1, -1)
        moved, moved_met = _meet(jnp.where(there & (x >= 0) & (x <= 9), rows - (rows & 15) + x, 0), x, state)
        met = jnp.sum(met + jnp.where(moves, moved_met, 0))
        rows = jnp.where(moves, moved, rows)
        state = state.replace(
            entities=rows[1:9, None] >> SHIFTS[None] & MASKS[None],
            move_timer=jnp.where(moves, state.move_speed, state.move_timer),
        )
        state = step_timers(state, params).replace(time=state.time + 1, terminal=met >= 16)
        done = self.is_terminal(state, params)
        info = {"discount": self.discount(state, params)}
        return self.get_obs(state), state, (met & 15).astype(jnp.float32), done, info

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 4]`."""
        rows, channel = _packed(state.entities)[:, None], np.arange(4)[None]
        here = jnp.where(rows & THERE != 0, 1 << (rows & 15), 0)  # a bit for each column
        trail = jnp.where(rows & RIGHT != 0, here >> 1, here << 1)
        player = jnp.where(ROW == state.player_y, 1 << state.player_x, 0)[:, None]
        is_gold = rows & GOLD != 0
        seen = jnp.where(channel == 1, jnp.where(is_gold, 0, here), jnp.where(is_gold, here, 0))
        seen = jnp.where(channel == 0, player, jnp.where(channel == 2, trail, seen))
        return (seen[:, None] >> ROW[None, :, None] & 1).astype(jnp.float32)


def _packed(entities: jax.Array) -> jax.Array:
    """`[8, 5]` to the numbers of all rows, `[10]`."""
    return jnp.sum(jnp.pad(entities, ((1, 1), (0, 0))) << SHIFTS[None], axis=1)


def _spawned(key: jax.Array, rows: jax.Array, spawns: jax.Array) -> jax.Array:
    """The rows with a new entity if one spawns: gymnax's draws.

    gymnax puts the slots into a random order and takes the first free one from the second place on, else the last.
    """
    key_right, key_gold, key_slot = jax.random.split(key, 3)
    right = 1 - jax.random.randint(key_right, (), 0, 2)
    odds = jnp.cumsum(jnp.array([1 / 3, 2 / 3]))  # as jax.random.choice computes it, without its search
    gold = 1 - (odds[0] < odds[-1] * (1 - jax.random.uniform(key_gold)))
    bits = jax.random.bits(jax.random.split(key_slot)[1], (8,), jnp.uint32)
    slot = ROW[:8]
    earlier = (bits[:, None] < bits[None]) | ((bits[:, None] == bits[None]) & (slot[:, None] < slot))
    place = jnp.pad(jnp.sum(earlier, axis=0), 1, constant_values=8)
    is_free = (rows & THERE == 0) & (place < 8)
    chosen = place == jnp.min(jnp.where(is_free & (place >= 1), place, 7))
    new = (1 - right) * 9 + (ROW << 4) + right * RIGHT + gold * GOLD + jnp.where(is_free, THERE, 0)
    return jnp.where(spawns & chosen, new, rows)


def _meet(rows: jax.Array, x: jax.Array, state: EnvState) -> tuple[jax.Array, jax.Array]:
    """The rows without gold at the player's place; 1 where gold was there, 16 where an enemy is.

    The entity of row i is in column `x[i]`.
    """
    is_gold = rows & GOLD != 0
    here = (rows & THERE != 0) & (x == state.player_x) & (ROW == state.player_y)
    return jnp.where(here & is_gold, 0, rows), jnp.where(here, jnp.where(is_gold, 1, 16), 0)
