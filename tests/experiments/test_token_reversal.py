"""The task and the opponents of `experiments.token_reversal`."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import token_reversal as study
from grpo_jax.objectives import policy_gradient_surrogate
from grpo_jax.objectives.slots import bound


@pytest.mark.parametrize("as_tokens", [False, True])
def test_only_the_prompt_backwards_is_paid(as_tokens):
    env = study.token_reversal(3, as_tokens)
    step = jax.jit(env.step)
    for mistake in (None, 0, 2):
        state, seen = env.reset(jax.random.key(1), {})
        prompt = np.array(state.problem)
        assert not as_tokens or [*env.prompt(state, {}), seen] == [*prompt]
        for place, bit in enumerate(prompt[::-1]):
            state, seen, reward, ended, *_ = step(None, state, bit ^ (place == mistake), {})
            assert ended == (place == 2) and reward == (place == 2 and mistake is None)
            assert not as_tokens or seen == bit ^ (place == mistake)


def test_the_gradient_of_dg_is_gated_by_delight():
    rng = np.random.default_rng(0)
    log_prob, behaviour, advantage = -rng.exponential(2, (3, 5, 7)).astype(np.float32) * [[[1]], [[1]], [[-1]]]
    advantage = (advantage - 2).astype(np.float32)
    advantage[0, 0], advantage[1] = 1e30, 0

    def surrogate(log_prob):
        batch = SimpleNamespace(log_prob=jnp.float32(behaviour), advantage=jnp.float32(advantage))
        log_ratio = study.delightful_ratio(log_prob - batch.log_prob, batch, None)
        return policy_gradient_surrogate(log_ratio, batch.advantage).sum()

    gate = 1 / (1 + np.exp(np.float64(advantage) * log_prob))
    np.testing.assert_allclose(jax.grad(surrogate)(jnp.float32(log_prob)), advantage * gate, rtol=2e-5)


def test_the_number_of_an_opponent_is_its_slots():
    algorithms = [algorithm for algorithm, _ in study.OPPONENTS.values()]
    log_ratio, advantage, mask = jnp.array([[-0.4], [0.5]]), jnp.array([[1.5], [1.5]]), jnp.ones((2, 1), bool)
    batch = SimpleNamespace(mask=mask, log_prob=log_ratio - 2, advantage=advantage, whole_sequences=True)

    def slots(algorithm, number):
        hyperparams = study.StudyHyperparams(method=number, clip_high=0.28)
        ratio = algorithm.ratio(log_ratio, batch, hyperparams)
        return algorithm.surrogate(ratio, advantage, hyperparams), bound(algorithm.reduce, hyperparams)(mask)

    found = jax.jit(jax.vmap(lambda number: slots(study.one_of(algorithms), number)))(jnp.arange(12.0))
    alone = jax.jit(lambda: [slots(algorithm, 0.0) for algorithm in algorithms])()
    for number, expected in enumerate(alone):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one[number], other, rtol=1e-6)
