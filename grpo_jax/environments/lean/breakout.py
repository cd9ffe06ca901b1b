"""Breakout-MinAtar for vectors. The ball's directions are 0 up left, 1 up right, 2 down right, 3 down left."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.breakout import EnvParams, EnvState, MinBreakout

from grpo_jax.environments.lean import randint

CELL = np.arange(100).reshape(10, 10)
WALL = ((CELL >= 10) & (CELL < 40)).astype(np.float32)
"""The bricks of a new wall."""


class Lean(MinBreakout):
    """gymnax's Breakout without tables of directions, gathers and scatters."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        state, reward = _step(self._moves(action), state)
        state = state.replace(time=state.time + 1)
        done = self.is_terminal(state, params)
        state = state.replace(terminal=done)
        info = {"discount": self.discount(state, params)}
        return self.get_obs(state), state, reward.astype(jnp.float32), done, info

    def reset_env(self, key: jax.Array, params: EnvParams) -> tuple[jax.Array, EnvState]:
        """A whole wall; the ball starts at the left or at the right."""
        right = randint(key, (), 2)
        x, y = 9 * right, jnp.array(3)
        state = EnvState(
            ball_y=y,
            ball_x=x,
            ball_dir=2 + right,
            pos=4,
            brick_map=jnp.asarray(WALL, float),
            strike=False,
            last_y=y,
            last_x=x,
            time=0,
            terminal=False,
        )
        return self.get_obs(state), state

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 4]`."""
        cell, channel = CELL[..., None], np.arange(4)[None, None]
        paddle = (channel == 0) & (cell == 90 + state.pos)
        ball = (channel == 1) & (cell == 10 * state.ball_y + state.ball_x)
        trail = (channel == 2) & (cell == 10 * state.last_y + state.last_x)
        bricks = (channel == 3) & (state.brick_map != 0)[..., None]
        return (paddle | ball | trail | bricks).astype(jnp.float32)

    def _moves(self, action: jax.Array) -> jax.Array:
        """The action among those of all games: 1 is left, 3 right."""
        return jnp.where(action == 2, 3, action) if len(self.action_set) == 3 else action


def _step(action: jax.Array, state: EnvState) -> tuple[EnvState, jax.Array]:
    """Moves the paddle and the ball, which bounces off borders, bricks and the paddle; the reward is a broken brick."""
    pos = jnp.clip(state.pos - (action == 1) + (action == 3), 0, 9)
    direction, last_x, last_y = state.ball_dir, state.ball_x, state.ball_y
    x = last_x + jnp.where((direction == 1) | (direction == 2), 1, -1)
    y = last_y + jnp.where(direction >= 2, 1, -1)
    direction = jnp.where((x < 0) | (x > 9), direction ^ 1, direction)
    x = jnp.clip(x, 0, 9)
    at_top = y < 0
    direction = jnp.where(at_top, 3 - direction, direction)
    y = jnp.maximum(y, 0)

    here = CELL == 10 * y + x
    found = jnp.sum((state.brick_map != 0) + 128 * (here & (state.brick_map == 1)))  # how many there are, and one here
    strikes = ~at_top & (found >= 128)
    breaks = strikes & ~state.strike
    bricks = jnp.where(breaks & here, 0.0, state.brick_map)
    direction = jnp.where(breaks, 3 - direction, direction)
    y = jnp.where(breaks, last_y, y)

    at_bottom = ~strikes & (y == 9)
    bricks = jnp.where(at_bottom & (found % 128 == breaks), WALL, bricks)
    on_paddle = at_bottom & (last_x == pos)  # above it before the ball moved
    on_edge = at_bottom & ~on_paddle & (x == pos)
    direction = jnp.where(on_paddle, 3 - direction, jnp.where(on_edge, direction ^ 2, direction))
    state = state.replace(
        ball_y=jnp.where(on_paddle | on_edge, last_y, y),
        ball_x=x,
        ball_dir=direction,
        pos=pos,
        brick_map=bricks,
        strike=strikes,
        last_y=last_y,
        last_x=last_x,
        terminal=at_bottom & ~on_paddle & ~on_edge,
    )
    return state, breaks
