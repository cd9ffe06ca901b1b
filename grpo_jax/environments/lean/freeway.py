"""Freeway-MinAtar for vectors. A car is a row of four: x, y, steps until it moves, speed; car i drives in row i + 1."""

import jax
import jax.numpy as jnp
from gymnax.environments.minatar.freeway import EnvParams, EnvState, MinFreeway, step_agent

from grpo_jax.environments.lean.draws import child, randint


class Lean(MinFreeway):
    """gymnax's Freeway with all cars at once."""

    def step_env(self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams):
        """One step of the game, without a reset at its end."""
        state, reward, wins = step_agent(self._moves(action), state, params)
        x, y, timer, speed = state.cars.T
        speed = jnp.where(wins, _speeds(key), speed)
        timer = jnp.where(wins, jnp.abs(speed), timer)

        moves = timer == 0
        timer = jnp.where(moves, jnp.abs(speed), timer - 1)
        moved_x = jnp.where(moves, jnp.where(speed > 0, x + 1, x - 1), x)
        moved_x = jnp.where(moves & (moved_x < 0), 9, jnp.where(moves & (moved_x > 9), 0, moved_x))
        hit = sum(((x == 4) | (moves & (moved_x == 4))) & (y == state.pos)) > 0
        state = state.replace(
            pos=jnp.where(hit, 9, state.pos),
            cars=jnp.stack([moved_x, y, timer, speed], axis=1),
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
        cars = jnp.pad(state.cars, ((1, 1), (0, 0)), constant_values=-1)  # the first and last row have none
        x, _, _, speed = cars.T[:, :, None, None]
        row, column, channel = jnp.ogrid[:10, :10, :7]
        behind = jnp.where(speed > 0, x - 1, x + 1)
        behind = jnp.where(behind < 0, 9, jnp.where(behind > 9, 0, behind))
        chicken = (channel == 0) & (row == state.pos) & (column == 4)
        car = (channel == 1) & (column == x)
        trail = (channel == jnp.abs(speed) + 1) & (column == behind) & (row >= 1) & (row <= 8)
        return (chicken | car | trail).astype(jnp.float32)

    def _moves(self, action: jax.Array) -> jax.Array:
        """The action among those of all games: 2 is up, 4 down."""
        return 2 * action if len(self.action_set) == 3 else action


def _speeds(key: jax.Array) -> jax.Array:
    """gymnax's draw of the speeds of eight cars, from -5 to -1 and 1 to 5."""
    speed, to_the_right = 1 + randint(child(key, 0), (8,), 5), randint(child(key, 1), (8,), 2)
    return speed * (2 * to_the_right - 1)
