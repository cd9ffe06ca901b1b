"""Budgets are counted exactly, beyond what float32 and int32 hold, and spent to the last iteration they allow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, counted

from grpo_jax import Config, Hyperparams, run
from grpo_jax.errors import ConfigError
from grpo_jax.training import budget

UNITS = [55, 2256, 64_000, 2**26]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("total", [1, 2**24 + 1, 3_000_000_123, 10**13 + 7])
def test_an_iteration_is_allowed_to_the_very_last_step(unit, total):
    total = min(max(total, unit), (2**31 - 2) * unit)  # no run makes more iterations
    limit = budget.make_budget(np.array([total]), np.inf, num_rows=1, unit=unit)
    made = np.array([0, total - unit - 1, total - unit, total - unit + 1, total])
    made = made[made >= 0]
    counts = budget.Count(*(part.astype(np.int32) for part in np.divmod(made, unit)))
    allowed = budget.allows_another(limit, counts, budget.zero())
    assert allowed.tolist() == [steps + unit <= total for steps in made]


@pytest.mark.parametrize("limit", [7.0, 7.5, 2.0**33 + 1])
def test_episodes_are_limited_to_a_number(limit):
    completed = (0, np.floor(limit) - 1, np.floor(limit), np.floor(limit) + 1, np.floor(limit) + 5)
    allowed = [
        bool(budget.allows_another(budget.make_budget(np.inf, limit, 1, unit=6), budget.zero(), count(number, 6)))
        for number in completed
    ]
    assert allowed == [number < limit for number in completed]


def test_temperature_0_is_refused():
    config = Config(environment=Probe(), algorithm="ppo", num_envs=4, num_steps=8, num_minibatches=2, hidden_sizes=(2,))
    with pytest.raises(ConfigError, match="temperature=0 takes the most probable token"):
        budget.check_budget(config, Hyperparams(temperature=0.0))


def test_more_episodes_than_iterations_can_be_counted_are_refused():
    config = Config(environment=Probe(), algorithm="ppo", num_envs=4, num_steps=8, num_minibatches=2, hidden_sizes=(2,))
    budget.check_budget(config, Hyperparams(total_steps=np.inf), max_episodes=10**9)
    with pytest.raises(ConfigError, match="max_episodes=1e\\+12 may take more than 2\\^31 iterations"):
        budget.check_budget(config, Hyperparams(total_steps=np.inf), max_episodes=10**12)


def count(number, unit):
    return budget.Count(*(jnp.int32(part) for part in divmod(int(number), unit)))


def test_counts_add_up_beyond_two_billion():
    numbers = np.random.default_rng(0).integers(0, 2**26, size=500)
    total, _ = jax.lax.scan(lambda sum, number: (budget.add(sum, number, 2**26), None), budget.zero(), numbers)
    assert counted(total, 2**26) == numbers.sum() > 10**10


@pytest.mark.parametrize(
    "num_envs, num_steps, num_iterations",
    [(4, 122, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((11, 5, 1), (48, 47, 2)))],
)
def test_a_budget_is_spent_to_its_last_iteration(num_envs, num_steps, num_iterations):
    config = Config(
        environment=Probe(), algorithm="ppo", num_envs=num_envs, num_steps=num_steps, num_epochs=1, num_minibatches=1,
        hidden_sizes=(2,),
    )  # fmt: skip
    total_steps = num_iterations * num_envs * num_steps
    result = run(config, Hyperparams(total_steps=float(total_steps)), jax.random.split(jax.random.key(0), 1))
    assert result.steps[-1, 0] == total_steps and len(result.steps) == num_iterations
