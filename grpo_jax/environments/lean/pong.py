"""Pong-misc for vectors."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.misc.pong import EnvParams, EnvState, Pong, move_paddles


class Lean(Pong):
    """gymnax's Pong without scatters."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        last = state.ball_position
        half, speed = self.paddle_half_height, params.paddle_y_speed
        state = move_paddles(action, speed, state, half, self.height, params.use_ai_policy)
        y, x = state.ball_position + state.ball_velocity
        down, right = state.ball_velocity

        at_border = y >= self.height
        y, down = jnp.where(at_border, 2 * (self.height - 1) - y, y), jnp.where(at_border, -down, down)
        off_center, from_left, from_right = y - state.paddle_centers, 2 - x, 2 * (self.width - 2) - x
        hits_left = (from_left >= 1) & (jnp.abs(off_center[0]) <= half)
        hits_right = (from_right < self.width - 2) & (jnp.abs(off_center[1]) < half + 1)
        for hits, reflected, offset in ((hits_left, from_left, off_center[0]), (hits_right, from_right, off_center[1])):
            limit = params.ball_max_y_speed
            turned = jnp.clip(down.astype(jnp.float32) + offset / float(half), -limit, limit).round()
            x, right = jnp.where(hits, reflected, x), jnp.where(hits, -right, right)
            down = jnp.where(hits, turned.astype(down.dtype), down)

        state = state.replace(
            ball_position=jnp.stack([y, x]),
            last_ball_position=last,
            ball_velocity=jnp.stack([down, right]),
            time=state.time + 1,
        )
        done = self.is_terminal(state, params)
        return (
            self.get_obs(state),
            state,
            1.0 - done.astype(jnp.float32),
            done,
            {"discount": self.discount(state, params)},
        )

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The paddles, the ball, and where it was a step ago, `[height, width, 3]`."""
        row, column, channel = np.ogrid[: self.height, : self.width, :3]
        cell = row * self.width + column

        def place(position):
            y, x = (jnp.clip(jnp.floor(position[i]), 0, size - 1) for i, size in enumerate((self.height, self.width)))
            return (y * self.width + x).astype(jnp.int32)

        left, right = jnp.floor(state.paddle_centers)
        is_paddle = jnp.abs(row - jnp.where(column == 0, left, right)) <= self.paddle_half_height
        seen = (channel == 0) & ((column == 0) | (column == self.width - 1)) & is_paddle
        seen |= (channel == 1) & (cell == place(state.ball_position))
        seen |= (channel == 2) & (cell == place(state.last_ball_position))
        return seen.astype(jnp.float32)
