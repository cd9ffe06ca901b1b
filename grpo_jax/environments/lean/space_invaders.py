"""SpaceInvaders-MinAtar for vectors: maps of [10, 10] throughout."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.space_invaders import EnvParams, EnvState, MinSpaceInvaders

GRID = np.arange(10)
ROW, COLUMN = np.ogrid[:10, :10]
WAVE = ((ROW < 4) & (COLUMN >= 2) & (COLUMN < 8)).astype(np.float32)
"""The aliens of a new wave."""


class Lean(MinSpaceInvaders):
    """gymnax's SpaceInvaders without a sort and without a loop over columns."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        state = _step_player(self._moves(action), state, params)
        state = _step_aliens(state)
        state, reward = _step_shots(state, params)
        cleared = ~jnp.any(state.alien_map != 0)
        ramps = cleared & (state.enemy_move_interval > 6) & state.ramping
        state = state.replace(time=state.time + 1)
        done = self.is_terminal(state, params)
        state = state.replace(
            shot_timer=state.shot_timer - (state.shot_timer > 0),
            alien_move_timer=state.alien_move_timer - 1,
            alien_shot_timer=state.alien_shot_timer - 1,
            enemy_move_interval=state.enemy_move_interval - ramps,
            ramp_index=state.ramp_index + ramps,
            alien_map=jnp.where(cleared, WAVE, state.alien_map),
            terminal=done,
        )
        return self.get_obs(state), state, reward.astype(jnp.float32), done, {"discount": 1 - done}

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 6]`."""
        cannon = (ROW == 9) & (COLUMN == state.pos)
        aliens = state.alien_map
        left, right = aliens * (state.alien_dir < 0), aliens * (state.alien_dir >= 0)
        maps = [cannon, aliens, left, right, state.f_bullet_map, state.e_bullet_map]
        return (jnp.stack(maps, axis=-1) != 0).astype(jnp.float32)

    def _moves(self, action: jax.Array) -> jax.Array:
        """The action among those of all games: 1 is left, 3 right, 5 fire."""
        return jnp.where(action == 0, 0, 2 * action - 1) if len(self.action_set) == 4 else action


def _step_player(action: jax.Array, state: EnvState, params: EnvParams) -> EnvState:
    """Fires, moves, and moves all bullets; ends the episode if one meets the player."""
    fires = (action == 5) & (state.shot_timer == 0)
    shot = fires & (ROW == 8) & (COLUMN == state.pos)  # fired from the last row, and moved with the others
    pos = jnp.clip(state.pos - (action == 1) + (action == 3), 0, 9)
    friendly = jnp.where(shot, 1.0, _shifted(state.f_bullet_map, -1))
    enemy = _shifted(state.e_bullet_map, 1)
    return state.replace(
        pos=pos,
        f_bullet_map=friendly,
        e_bullet_map=enemy,
        shot_timer=jnp.where(fires, params.shot_cool_down, state.shot_timer),
        terminal=state.terminal | _last_row_meets(enemy, pos),
    )


def _shifted(bullets: jax.Array, rows: int) -> jax.Array:
    """The map a row further up (-1) or down (1); bullets that leave it are gone."""
    return jnp.pad(bullets, ((1, 0), (0, 0)))[:-1] if rows == 1 else jnp.pad(bullets, ((0, 1), (0, 0)))[1:]


def _last_row_meets(there: jax.Array, pos: jax.Array) -> jax.Array:
    return jnp.any((there[9] != 0) & (GRID == pos))


def _step_aliens(state: EnvState) -> EnvState:
    """Moves the aliens, down and back at a border; ends the episode if one meets the player or leaves the last row."""
    aliens, moves = state.alien_map, state.alien_move_timer == 0
    to_the_right = state.alien_dir > 0
    turns = moves & jnp.where(to_the_right, jnp.any(aliens[:, 9] > 0), jnp.any(aliens[:, 0] > 0))
    to_the_right = to_the_right ^ turns
    sideways = jnp.where(to_the_right, jnp.roll(aliens, 1, axis=1), jnp.roll(aliens, -1, axis=1))
    moved = jnp.where(moves, jnp.where(turns, jnp.roll(aliens, 1, axis=0), sideways), aliens)
    lands = turns & jnp.any(aliens[9] > 0)
    meets = _last_row_meets(aliens, state.pos) | (moves & _last_row_meets(moved, state.pos))
    interval = jnp.minimum(jnp.sum(aliens != 0), state.enemy_move_interval)
    return state.replace(
        alien_move_timer=jnp.where(moves, interval, state.alien_move_timer),
        alien_dir=jnp.where(turns, -state.alien_dir, state.alien_dir),
        alien_map=moved,
        terminal=state.terminal | lands | meets,
    )


def _step_shots(state: EnvState, params: EnvParams) -> tuple[EnvState, jax.Array]:
    """The lowest alien of the nearest column shoots; friendly bullets and the aliens that they meet are gone."""
    aliens = state.alien_map
    shoots = state.alien_shot_timer == 0
    occupied = jnp.any(aliens != 0, axis=0)
    distance = jnp.where(occupied, 10 * jnp.abs(GRID - state.pos) + GRID, 1000)  # of two as near, the left one
    nearest = occupied & (distance == jnp.min(distance))
    lowest = jnp.max(jnp.where(aliens != 0, ROW, 0), axis=0)
    shot = shoots & nearest[None] & (ROW == lowest[None])
    killed = (aliens != 0) & (aliens == state.f_bullet_map)
    state = state.replace(
        alien_shot_timer=jnp.where(shoots, params.enemy_shot_interval, state.alien_shot_timer),
        e_bullet_map=jnp.where(shot, 1.0, state.e_bullet_map),
        alien_map=jnp.where(killed, 0.0, aliens),
        f_bullet_map=jnp.where(killed, 0.0, state.f_bullet_map),
    )
    return state, jnp.sum(killed)
