"""Games of pgx."""

from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.suites.naming import check_known
from grpo_jax.environments.suites.timed import Timed, TimedState
from grpo_jax.errors import ConfigError


class Pgx(Timed):
    """A single-player game, such as "pgx:2048" or "pgx:minatar-breakout", truncated at 2000 steps."""

    def __init__(self, name: str):
        import pgx

        check_known("pgx", name, pgx.available_envs())
        inner = pgx.make(name)
        if inner.num_players != 1:
            raise ConfigError(f"'pgx:{name}' is a game of {inner.num_players} players; use a single-player game")
        super().__init__(inner, 2000)
        if not name.startswith("minatar"):  # in MinAtar every action is legal
            self.action_mask = lambda state, params: state.inner.legal_action_mask

    def action_space(self, params):
        """As in gymnax."""
        return Discrete(self.inner.num_actions)

    def reset_env(self, key, params):
        """As in gymnax."""
        inner = self.inner.init(key)
        return inner.observation, TimedState(inner, 0)

    def step_env(self, key, state, action, params):
        """As in gymnax."""
        inner = self.inner.step(state.inner, action, key)
        return inner.observation, TimedState(inner, state.time + 1), inner.rewards[0], inner.terminated, {}
