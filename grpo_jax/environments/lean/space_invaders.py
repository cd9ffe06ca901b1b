"""SpaceInvaders-MinAtar for vectors: a map is ten numbers, a bit for each column of a row."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.space_invaders import EnvParams, EnvState, MinSpaceInvaders

GRID = np.arange(10)
WAVE = np.where(GRID < 4, 0b0011111100, 0)
"""The aliens of a new wave."""


class Lean(MinSpaceInvaders):
    """gymnax's SpaceInvaders without a sort and without a loop over columns."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        action = self._moves(action)
        aliens, shots, bombs = map(_bits, (state.alien_map, state.f_bullet_map, state.e_bullet_map))
        fires = (action == 5) & (state.shot_timer == 0)
        shots = _down(shots, -1) | jnp.where(fires & (GRID == 8), 1 << state.pos, 0)
        bombs = _down(bombs, 1)
        pos = jnp.clip(state.pos - (action == 1) + (action == 3), 0, 9)
        aliens, direction, meets = _move(aliens, state, 1 << pos)
        meets |= bombs[9] >> pos & 1 != 0

        drops = state.alien_shot_timer == 0
        bombs |= jnp.where(drops, _bomb(aliens, pos), 0)
        killed = aliens & shots
        num_aliens, num_killed = (jnp.sum(jax.lax.population_count(rows)) for rows in (aliens, killed))
        interval = jnp.minimum(num_aliens, state.enemy_move_interval)
        cleared = num_aliens == num_killed
        ramps = cleared & (state.enemy_move_interval > 6) & state.ramping
        shot_timer = jnp.where(fires, params.shot_cool_down, state.shot_timer)
        state = state.replace(
            pos=pos,
            f_bullet_map=_map(shots & ~killed),
            e_bullet_map=_map(bombs),
            alien_map=_map(jnp.where(cleared, WAVE, aliens & ~killed)),
            alien_dir=direction,
            shot_timer=shot_timer - (shot_timer > 0),
            alien_move_timer=jnp.where(state.alien_move_timer == 0, interval, state.alien_move_timer) - 1,
            alien_shot_timer=jnp.where(drops, params.enemy_shot_interval, state.alien_shot_timer) - 1,
            enemy_move_interval=state.enemy_move_interval - ramps,
            ramp_index=state.ramp_index + ramps,
            time=state.time + 1,
            terminal=state.terminal | meets,
        )
        done = self.is_terminal(state, params)
        state = state.replace(terminal=done)
        return self.get_obs(state), state, num_killed.astype(jnp.float32), done, {"discount": 1 - done}

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 6]`."""
        aliens, shots, bombs = (_bits(x)[:, None] for x in (state.alien_map, state.f_bullet_map, state.e_bullet_map))
        channel, left = np.arange(6)[None], state.alien_dir < 0
        rows = jnp.where(channel == 0, jnp.where(GRID == 9, 1 << state.pos, 0)[:, None], aliens)
        rows = jnp.where(
            channel == 2, jnp.where(left, aliens, 0), jnp.where(channel == 3, jnp.where(left, 0, aliens), rows)
        )
        rows = jnp.where(channel == 4, shots, jnp.where(channel == 5, bombs, rows))  # [10, 6]
        return (rows[:, None] >> GRID[None, :, None] & 1).astype(jnp.float32)

    def _moves(self, action: jax.Array) -> jax.Array:
        """The action among those of all games: 1 is left, 3 right, 5 fire."""
        return jnp.where(action == 0, 0, 2 * action - 1) if len(self.action_set) == 4 else action


def _bits(board: jax.Array) -> jax.Array:
    """`[10, 10]` to the bits of each row, `[10]`."""
    return jnp.sum(jnp.where(board != 0, 1 << GRID[None], 0), axis=1)


def _map(rows: jax.Array) -> jax.Array:
    """The inverse of `_bits`."""
    return (rows[:, None] >> GRID[None] & 1).astype(jnp.float32)


def _down(rows: jax.Array, number: int) -> jax.Array:
    """The rows moved down by a number; what leaves the board is gone."""
    return jax.lax.pad(rows, rows.dtype.type(0), [(number, -number, 0)])


def _columns(rows: jax.Array) -> jax.Array:
    """The bits that are set in any row."""
    return jax.lax.reduce(rows, rows.dtype.type(0), jax.lax.bitwise_or, (0,))


def _move(aliens: jax.Array, state: EnvState, cannon: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The aliens after a move, down and back at a border; their direction; whether one meets the cannon or lands."""
    moves, to_the_right = state.alien_move_timer == 0, state.alien_dir > 0
    turns = moves & (_columns(aliens) & jnp.where(to_the_right, 1 << 9, 1) != 0)
    left, right = aliens >> 1 | (aliens & 1) << 9, aliens << 1 & 1023 | aliens >> 9
    down = _down(aliens, 1) | jnp.where(GRID == 0, aliens[9], 0)
    moved = jnp.where(turns, down, jnp.where(to_the_right ^ turns, right, left))
    lands = turns & (aliens[9] != 0)
    meets = (aliens[9] | jnp.where(moves, moved[9], 0)) & cannon != 0
    return jnp.where(moves, moved, aliens), jnp.where(turns, -state.alien_dir, state.alien_dir), lands | meets


def _bomb(aliens: jax.Array, pos: jax.Array) -> jax.Array:
    """The bits of the lowest alien of the nearest column, of two as near the left one."""
    columns = _columns(aliens)
    right, left = columns >> pos, columns & (1 << pos) - 1
    to_right = jax.lax.population_count((right & -right) - 1)  # zeros below the lowest bit; 32 if there is none
    to_left = jnp.where(left == 0, 32, pos - 31 + jax.lax.clz(left))
    column = jnp.where(columns == 0, 0, 1 << jnp.where(to_left <= to_right, pos - to_left, pos + to_right))
    below = jnp.where(GRID[:, None] > GRID, aliens[:, None], 0)
    return aliens & ~jax.lax.reduce(below, below.dtype.type(0), jax.lax.bitwise_or, (0,)) & column
