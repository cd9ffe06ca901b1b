"""CartPole with a number that is drawn at each reset, fixes a part of the return, and is not observed."""

from typing import Any

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments.classic_control.cartpole import EnvParams


@struct.dataclass
class Params(EnvParams):
    spread: float = 0.0


@struct.dataclass
class State:
    pole: Any
    hidden: jax.Array  # in [-1, 1)
    owed: jax.Array  # rewards that are not yet paid


class HiddenCartPole:
    """CartPole-v1 whose parameter `spread` says how much the hidden number `u`, uniform in [-1, 1), changes.

        scale  every reward is multiplied by exp(spread · u)
        bonus  the last step of an episode pays spread · u more
        delay  rewards are paid together, every exp(spread · (u + 1) / 2) steps and at the end of the episode
        level  the force is multiplied by exp(spread · u), the length of the pole by exp(-spread · u)

    Args:
      kind: one of these.
      observed: observations are `{"pole": [4], "hidden": [1]}`, for a critic that sees more than the actor.
    """

    def __init__(self, kind: str, observed: bool = False):
        self.name = f"CartPole with a hidden {kind}"
        self.kind, self.observed = kind, observed
        self.cart_pole = gymnax.make("CartPole-v1")[0]
        self.default_params = Params()

    def action_space(self, params: Params) -> Any:
        return self.cart_pole.action_space(params)

    def reset_env(self, key: jax.Array, params: Params) -> tuple[Any, State]:
        key_pole, key_hidden = jax.random.split(key)
        observation, pole = self.cart_pole.reset_env(key_pole, params)
        state = State(pole, jax.random.uniform(key_hidden, minval=-1.0), jnp.zeros(()))
        return self._observe(observation, state), state

    def step_env(self, key: jax.Array, state: State, action: jax.Array, params: Params) -> tuple:
        size = params.spread * state.hidden
        if self.kind == "level":
            length = params.length * jnp.exp(-size)
            params = params.replace(
                force_mag=params.force_mag * jnp.exp(size),
                length=length,
                polemass_length=params.masspole * length,
            )
        observation, pole, reward, terminated, _ = self.cart_pole.step_env(key, state.pole, action, params)
        last = terminated | self.cart_pole.is_truncated(pole, params)
        owed = jnp.zeros(())
        if self.kind == "scale":
            reward *= jnp.exp(size)
        elif self.kind == "bonus":
            reward += size * last
        elif self.kind == "delay":
            period = jnp.exp(params.spread * (state.hidden + 1) / 2).astype(jnp.int32)
            owed = state.owed + reward
            paid = last | (pole.time % period == 0)
            reward, owed = jnp.where(paid, owed, 0.0), jnp.where(paid, 0.0, owed)
        state = State(pole, state.hidden, owed)
        return self._observe(observation, state), state, reward, terminated, {}

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        return self.cart_pole.is_truncated(state.pole, params)

    def _observe(self, observation: jax.Array, state: State) -> Any:
        return {"pole": observation, "hidden": state.hidden[None]} if self.observed else observation
