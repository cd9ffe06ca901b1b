"""CartPole with a number that is drawn at each reset, fixes a part of the return, and need not be observed."""

from typing import Any

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments.classic_control.cartpole import EnvParams


@struct.dataclass
class Params(EnvParams):
    scale: float = 0.0
    bonus: float = 0.0
    delay: float = 0.0
    level: float = 0.0
    num_values: int = 0


@struct.dataclass
class State:
    pole: Any
    hidden: jax.Array  # in [-1, 1]
    owed: jax.Array  # rewards that are not yet paid


class HiddenCartPole:
    """CartPole-v1 with a hidden number `u`. Its parameters say how much that changes.

        scale       every reward is multiplied by exp(scale · u)
        bonus       the last step of an episode pays bonus · u more
        delay       rewards are paid together, every exp(delay · (u + 1) / 2) steps and at the end of the episode
        level       the force is multiplied by exp(level · u), the length of the pole by exp(-level · u)
        num_values  how many values `u` has, evenly from -1 to 1; with 0 it is uniform in [-1, 1)

    Args:
      observed: observations are `{"seen": [4], "hidden": [1]}` instead of the former alone.
    """

    name = "CartPole with a hidden number"

    def __init__(self, observed: bool = False):
        self.observed = observed
        self.cart_pole = gymnax.make("CartPole-v1")[0]
        self.default_params = Params()

    def action_space(self, params: Params) -> Any:
        return self.cart_pole.action_space(params)

    def reset_env(self, key: jax.Array, params: Params) -> tuple[Any, State]:
        key_pole, key_hidden = jax.random.split(key)
        observation, pole = self.cart_pole.reset_env(key_pole, params)
        hidden = jax.random.uniform(key_hidden, minval=-1.0)
        number = jnp.floor((hidden + 1) / 2 * params.num_values)
        few = 2 * number / jnp.maximum(params.num_values - 1, 1) - 1
        state = State(pole, jnp.where(params.num_values == 0, hidden, few), jnp.zeros(()))
        return self._observe(observation, state), state

    def step_env(self, key: jax.Array, state: State, action: jax.Array, params: Params) -> tuple:
        stronger, length = jnp.exp(params.level * state.hidden), params.length * jnp.exp(-params.level * state.hidden)
        changed = {"force_mag": params.force_mag * stronger, "length": length}
        changed["polemass_length"] = params.masspole * length
        observation, pole, reward, terminated, _ = self.cart_pole.step_env(
            key, state.pole, action, params.replace(**changed)
        )
        last = terminated | self.cart_pole.is_truncated(pole, params)
        reward = reward * jnp.exp(params.scale * state.hidden) + last * params.bonus * state.hidden
        period = jnp.exp(params.delay * (state.hidden + 1) / 2).astype(jnp.int32)
        paid, owed = last | (pole.time % period == 0), state.owed + reward
        state = State(pole, state.hidden, jnp.where(paid, 0.0, owed))
        return self._observe(observation, state), state, jnp.where(paid, owed, 0.0), terminated, {}

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        return self.cart_pole.is_truncated(state.pole, params)

    def _observe(self, observation: jax.Array, state: State) -> Any:
        return {"seen": observation, "hidden": state.hidden[None]} if self.observed else observation
