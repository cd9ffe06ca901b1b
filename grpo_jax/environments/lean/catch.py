"""Catch-bsuite for vectors."""

import jax
import numpy as np
from gymnax.environments.bsuite.catch import Catch, EnvState


class Lean(Catch):
    """gymnax's Catch with an observation that compares places."""

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        """The ball and the paddle on the board, `[rows, columns]`."""
        row, column = np.ogrid[: self.rows, : self.columns]
        ball = (row == state.ball_y) & (column == state.ball_x)
        paddle = (row == state.paddle_y) & (column == state.paddle_x)
        return (ball | paddle).astype(float)
