import types

import jax
import numpy as np
import pytest

from experiments.harness.summaries import read_results, write_results
from experiments.per_step_groups import Arguments, per_step_normalized
from grpo_jax import Hyperparams
from grpo_jax.errors import ConfigError

T, GROUPS, MEMBERS = 7, 3, 5


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_returns_to_go_are_compared_at_each_step(scale):
    """Against loops in float64; a member counts until its episode ends, and the first group's members are equal."""
    rng = np.random.default_rng(0)
    reward = (scale * rng.normal(size=(T, GROUPS, MEMBERS))).astype(np.float32)
    last = rng.integers(0, T, (GROUPS, MEMBERS))
    last[1] = [T - 1, 0, 1, 1, 2]  # one plays alone at the end
    reward[:, 0], last[0] = reward[:, 0, :1], T - 2
    step = np.arange(T)[:, None, None]
    arrays = {"reward": np.where(step <= last, reward, 0), "ended": step == last, "valid": step <= last}
    trajectory = types.SimpleNamespace(**{name: each.reshape(T, -1) for name, each in arrays.items()})
    actual = jax.jit(lambda: per_step_normalized(trajectory, Hyperparams(discount=0.9), MEMBERS))()

    returns, expected = np.zeros((T + 1, GROUPS, MEMBERS)), np.zeros((T, GROUPS, MEMBERS))
    for t in reversed(range(T)):
        returns[t] = arrays["reward"][t] + np.float32(0.9) * returns[t + 1]
        for g in range(GROUPS):
            playing = returns[t, g, t <= last[g]]
            expected[t, g, t <= last[g]] = (playing - playing.mean()) / (playing.std() + 1e-6) if len(playing) else 0
    expected[:, 0] = 0
    assert (expected[3:, 1] == 0).all() and not np.asarray(actual).reshape(T, GROUPS, MEMBERS)[:, 0].any()
    np.testing.assert_allclose(actual, expected.reshape(T, -1), rtol=1e-4, atol=1e-5)


def test_results_of_another_budget_are_not_added_to(tmp_path):
    for _ in range(2):
        read_results(tmp_path, Arguments())
        write_results({"Pendulum-v1": {}}, tmp_path, [], lambda name, entry: [], Arguments())
    with pytest.raises(ConfigError, match="has results with .*'total_steps': 200000, .* not .*'total_steps': 100"):
        read_results(tmp_path, Arguments(total_steps=100))
    (tmp_path / "flags.json").unlink()
    with pytest.raises(ConfigError, match="flags.json cannot be read"):
        read_results(tmp_path, Arguments())
