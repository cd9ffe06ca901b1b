"""Freeway-MinAtar for vectors. A car is a row of four: x, y, steps until it moves, speed; car i drives in row i + 1.

XLA fuses sums over the ten rows of the board with what is around them, but not over the eight cars: for powers of two
it has kernels of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.minatar.freeway import EnvParams, EnvState, MinFreeway, step_agent

from grpo_jax.environments.lean import child, randint

ROW = np.arange(10)
IS_ROAD = (ROW >= 1) & (ROW <= 8)


class Lean(MinFreeway):
    """gymnax's Freeway with all cars at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        state, reward, wins = step_agent(self._moves(action), state, params)
        x, timer, speed = _by_row(state.cars)
        speed = jnp.where(wins, jnp.pad(_speeds(key), 1), speed)
        timer = jnp.where(wins, jnp.abs(speed), timer)

        moves = timer == 0
        timer = jnp.where(moves, jnp.abs(speed), timer - 1)
        moved_x = jnp.where(moves, _around(jnp.where(speed > 0, x + 1, x - 1)), x)
        hit = jnp.any(IS_ROAD & ((x == 4) | (moved_x == 4)) & (ROW == state.pos))
        cars = jnp.stack([moved_x, jnp.asarray(ROW), timer, speed], axis=1)[1:9]
        state = state.replace(
            pos=jnp.where(hit, 9, state.pos),
            cars=cars,
            move_timer=state.move_timer - (state.move_timer > 0),
            time=state.time + 1,
        )
        done = self.is_terminal(state, params)
        state = state.replace(terminal=done)
        info = {"discount": self.discount(state, params)}
        return self.get_obs(state), state, reward.astype(jnp.float32), done, info

    def reset_env(self, key: jax.Array, params: EnvParams) -> tuple[jax.Array, EnvState]:
        """All cars at the left, each with a random speed."""
        speed = _speeds(key)
        cars = jnp.stack([jnp.zeros(8, jnp.int32), jnp.arange(1, 9, dtype=jnp.int32), jnp.abs(speed), speed], axis=1)
        state = EnvState(pos=9, cars=cars, move_timer=params.player_speed, time=0, terminal=False)
        return self.get_obs(state), state

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The channels of the board, `[10, 10, 7]`."""
        x, _, speed = (column[:, None] for column in _by_row(state.cars))
        road, channel = IS_ROAD[:, None], np.arange(7)[None]
        seen = jnp.where(road & (channel == 1), 1 << x, 0)  # a bit for each column
        behind = 1 << _around(jnp.where(speed > 0, x - 1, x + 1))
        seen = jnp.where(road & (channel == jnp.abs(speed) + 1), behind, seen)
        seen = jnp.where((channel == 0) & (ROW == state.pos)[:, None], 1 << 4, seen)
        return (seen[:, None] >> ROW[None, :, None] & 1).astype(jnp.float32)

    def _moves(self, action: jax.Array) -> jax.Array:
        """The action among those of all games: 2 is up, 4 down."""
        return 2 * action if len(self.action_set) == 3 else action


def _by_row(cars: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[10]` each: x, steps until it moves and speed of the car in each row."""
    x, _, timer, speed = jnp.pad(cars, ((1, 1), (0, 0))).T
    return x, timer, speed


def _around(x: jax.Array) -> jax.Array:
    """Cars leave the board at one side and enter it at the other."""
    return jnp.where(x < 0, 9, jnp.where(x > 9, 0, x))


def _speeds(key: jax.Array) -> jax.Array:
    """gymnax's draw of the speeds of eight cars, from -5 to -1 and 1 to 5."""
    speed, to_the_right = 1 + randint(child(key, 0, 2), (8,), 5), randint(child(key, 1, 2), (8,), 2)
    return (speed * (2 * to_the_right - 1)).astype(jnp.int32)
