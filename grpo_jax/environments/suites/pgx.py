"""Games of pgx: one player, or two, of whom the environment plays one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.environments.parameters import Timed, TimedState
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError

LIMITS = {"tic_tac_toe": 5, "connect_four": 21, "go_9x9": 81, "go_19x19": 361, "hex": 62, "othello": 60}
LIMITS |= {"chess": 256, "gardner_chess": 128, "shogi": 256, "animal_shogi": 128}
LIMITS |= {"kuhn_poker": 2, "leduc_holdem": 4}
"""The most moves of one player in games that always end; the time limit of the others is 2000 steps."""


def random_legal(key: jax.Array, observation: jax.Array, action_mask: jax.Array) -> jax.Array:
    """A legal action, all equally likely."""
    return jax.random.categorical(key, jnp.where(action_mask, 0.0, -jnp.inf))


class Pgx(Timed):
    """A game, such as "pgx:2048", "pgx:minatar-breakout" or "pgx:tic_tac_toe".

    In a game of two players a step is a move and the opponent's reply, or replies. The reward is the learning player's:
    1 for a win, -1 for a loss in most games. Each reset draws who begins.

    Args:
      name: in pgx.
      against: in a game of two players, how the opponent moves: `(key, observation, action_mask) -> action`, of one
        game, as the opponent sees it. By default it moves at random.
    """

    def __init__(self, name: str, against: Callable[..., jax.Array] = random_legal):
        import pgx

        inner = pgx.make(name)
        if inner.num_players > 2:
            raise ConfigError(f"'pgx:{name}' is a game of {inner.num_players} players; use a game of one or two")
        super().__init__(inner, LIMITS.get(name, 2000))
        self.name, self._against = f"pgx:{name}", against
        if not name.startswith("minatar"):  # in MinAtar every action is legal
            self.action_mask = lambda state, params: state.inner.legal_action_mask

    def action_space(self, params):
        return Discrete(self.inner.num_actions)

    def reset_env(self, key, params):
        key, key_reply = jax.random.split(key) if self.inner.num_players == 2 else (key, None)
        inner, _ = self._replied(key_reply, self.inner.init(key))
        return inner.observation, TimedState(inner, 0)

    def step_env(self, key, state, action, params):
        key, key_reply = jax.random.split(key) if self.inner.num_players == 2 else (key, None)
        inner, reward = self._replied(key_reply, self.inner.step(state.inner, action, key))
        return inner.observation, TimedState(inner, state.time + 1), reward, inner.terminated, {}

    def _replied(self, key, state):
        """The state and the reward once it is the learning player's turn, player 0, or the game is over.

        pgx draws at a reset who is player 0.
        """
        if self.inner.num_players == 1:
            return state, state.rewards[0]

        def is_waiting(turn):
            state, _, _ = turn
            return (state.current_player != 0) & ~state.terminated

        def reply(turn):
            state, reward, key = turn
            key, key_action, key_step = jax.random.split(key, 3)
            action = self._against(key_action, state.observation, state.legal_action_mask)
            state = self.inner.step(state, action, key_step)
            return state, reward + state.rewards[0], key

        state, reward, _ = jax.lax.while_loop(is_waiting, reply, (state, state.rewards[0], key))
        return state, reward
