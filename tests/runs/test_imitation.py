"""Token tasks in training: answers, warm starts, and runs that begin with them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import check, difference

from grpo_jax import GRPO, Config, Hyperparams, evaluate, objectives, run
from grpo_jax.algorithms import with_reference
from grpo_jax.environments.tokens import ACCURACY, FORMAT, make_task, text
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.generation import answer
from grpo_jax.policies import MLP, Transformer
from grpo_jax.recording.statistics import pass_at_k
from grpo_jax.runs.imitation import UPDATES_PER_CHUNK, completion_loss, imitate, imitation_loss, warm_start
from grpo_jax.training.train import initial_states
from grpo_jax.types import RewardParts

SMALL = {"num_envs": 8, "group_size": 4, "num_minibatches": 1}
SMALL["network"] = Transformer(width=16, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def config():
    return Config(environment=make_task("sort-2")._replace(rewards=(ACCURACY, FORMAT)), **SMALL)


@pytest.fixture(scope="module")
def start(config):
    keys = jax.random.split(jax.random.key(0), 2)
    return warm_start(config, keys, target=0.1, learning_rate=1e-2, batch_size=64, max_updates=500)


@pytest.mark.slow
def test_a_warm_start_ends_at_its_target(config, start):
    assert (start.accuracy >= 0.1).all() and (start.updates < 500).all()
    ask = jax.jit(lambda params: answer(config, params, jax.random.key(5), num_prompts=256, num_samples=2))
    answers = ask(jax.tree.map(lambda leaf: leaf[0], start.params))
    assert answers.correct.mean() == pytest.approx(start.accuracy[0], abs=0.1)
    task = config.env.task
    for prompt, completions, correct in zip(answers.prompts, answers.completions, answers.correct, strict=True):
        asked = "".join(sorted(text(task, prompt)))
        assert [text(task, completion) == asked + "$" for completion in completions] == correct.tolist()
        break
    assert (answers.well_formed | ~answers.correct).all()


@pytest.mark.slow
def test_a_policy_that_knows_nothing_has_the_loss_of_a_guess(config):
    params = jax.tree.map(jnp.zeros_like, config.policy.init(jax.random.key(0)))
    loss = jax.jit(lambda params: imitation_loss(config, params, jax.random.key(0), 8))(params)
    assert loss == pytest.approx(np.log(12), rel=1e-5)


@pytest.mark.slow
def test_a_run_starts_from_given_parameters(config, start):
    keys = jax.random.split(jax.random.key(1), 2)
    of_reference = Config(environment=config.environment, algorithm=with_reference(GRPO), **SMALL)
    still = Hyperparams(learning_rate=0.0, total_steps=of_reference.steps_per_iteration)
    begun = initial_states(of_reference, still, keys, params=start.params)
    assert not difference(begun.params, start.params) and not difference(begun.reference_params, start.params)
    ended = run(of_reference, still, keys, params=lambda: start.params)
    assert not difference(ended.states.params, start.params)
    assert ended.metrics["policy/kl_reference"] == pytest.approx(0, abs=1e-5)
    first = jax.tree.map(lambda leaf: leaf[0], ended.states)
    play = jax.jit(lambda weights: evaluate(of_reference, first, keys[0], num_episodes=64, env_params=weights).returns)
    returns = play({"held_out": jnp.int32(1), "accuracy": jnp.float32(3.0), "format": jnp.float32(0.0)})
    assert set(returns.tolist()) == {0.0, 3.0}


def test_each_row_learns_until_its_accuracy_and_no_longer():
    """Weights that shrink to 0, of which the accuracy is a function, each row from its own weights."""
    config = Config(environment="Catch-bsuite", network=MLP((2,)), algorithm="grpo", num_envs=8)

    def size(params, key=None):
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))

    def learn(**options):
        keys = jax.random.split(jax.random.key(0), 2)
        return imitate(config, keys, size, lambda params, key: jnp.exp(-size(params)), **options)

    ended = learn(target=0.5, learning_rate=2e-2)
    assert (ended.accuracy >= 0.5).all() and (ended.updates % UPDATES_PER_CHUNK == 0).all()
    first, last = np.sort(ended.updates)
    before, between = (learn(target=0.5, learning_rate=2e-2, max_updates=int(n) - 1) for n in (first - 25, last - 25))
    assert (before.accuracy < 0.5).all() and between.accuracy.min() < 0.5, "not done before"
    row = int(np.argmin(ended.updates))
    assert first == last or between.accuracy[row] == ended.accuracy[row], "unchanged while the other learns"
    of_params = [np.exp(-sum(np.square(leaf[row]).sum() for leaf in jax.tree.leaves(ended.params))) for row in (0, 1)]
    assert ended.accuracy == pytest.approx(of_params, rel=1e-5)
    assert (learn(target=1.0, learning_rate=1e-9, max_updates=30).updates == 2 * UPDATES_PER_CHUNK).all()


def test_only_tokens_of_the_policy_are_learnt():
    """The mean of -log p over the tokens before the end that the task does not write, as computed by NumPy."""
    rng, completions = np.random.default_rng(0), np.array([[2, 0, 1], [1, -1, -1]])
    logits = rng.normal(size=(3, 2, 3)).astype(np.float32)
    log_probs, seen = logits - np.log(np.exp(logits).sum(-1, keepdims=True)), []

    def sequence(params, observation, carry, is_first):
        seen.append((observation, carry, is_first))
        return params, None

    def log_prob(logits, actions):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], axis=-1)[..., 0]

    distribution = SimpleNamespace(log_prob=log_prob)
    policy = SimpleNamespace(sequence=sequence, sequence_carry=lambda carry: carry, distribution=distribution)
    loss = completion_loss(policy, logits, "carry", jnp.array([7, 8]), jnp.array(completions))
    chosen = [log_probs[0, 0, 2], log_probs[1, 0, 0], log_probs[2, 0, 1], log_probs[0, 1, 1]]
    assert loss == pytest.approx(-np.mean(chosen), rel=1e-5)
    observation, carry, is_first = seen[0]
    assert observation.tolist() == [[7, 8], [2, 1], [0, 0]] and carry == "carry"
    assert is_first.tolist() == [[True, True], [False, False], [False, False]]
    forced = jnp.array([[False, True, False], [False, False, False]])
    loss = completion_loss(policy, logits, "carry", jnp.array([7, 8]), jnp.array(completions), forced)
    assert loss == pytest.approx(-np.mean([*chosen[:1], *chosen[2:]]), rel=1e-5)


def test_each_part_of_a_reward_is_normalised_by_itself():
    """Two steps of two groups of two, two parts of the reward whose weights differ between the groups."""
    values = jnp.array([[[0, 1], [1, 0], [0, 3], [0, 5]], [[1, 0], [0, 2], [0, 9], [0, 0]]], jnp.float32)
    weights = jnp.broadcast_to(jnp.array([[1, 0.1], [1, 0.1], [2, 0.5], [2, 0.5]]), values.shape)
    valid = jnp.array([[True] * 4, [True, True, False, True]])
    of_parts = objectives.outcome(
        objectives.decoupled_normalized, objectives.reward_part_scores, objectives.reward_part_weights
    )

    @jax.jit
    def compare(valid, values, weights):
        return of_parts(SimpleNamespace(valid=valid, reward_parts=RewardParts(values, weights)), Hyperparams(), 2)

    advantage = compare(valid, values, weights)
    np.testing.assert_allclose(advantage[0], [-0.1, 0.1, -0.5, 0.5], rtol=1e-4)
    np.testing.assert_allclose(advantage[1], [-0.1, 0.1, 0.0, 0.5], rtol=1e-4)
    with pytest.raises(ConfigError, match="parts of the reward"):
        check(Config(environment="Catch-bsuite", algorithm=GRPO._replace(advantage=of_parts)))


def test_pass_at_k_counts_choices():
    correct = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]], bool)
    assert pass_at_k(correct, 1) == pytest.approx(4 / 12)
    assert pass_at_k(correct, 2) == pytest.approx((1 - 3 / 6 + 0 + 1) / 3)
    assert pass_at_k(correct, 4) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="from 1 to the 4"):
        pass_at_k(correct, 5)


@pytest.mark.parametrize(
    "environment, options, message",
    [
        ("tokens:sort-2", {"target": 40}, "a fraction"),
        ("Catch-bsuite", {"target": 0.4}, "such as tokens:sort-5"),
        ("tokens:sort-2", {"target": 0.5, "learning_rate": 0.0}, "a positive number"),
        ("tokens:sort-2", {"target": 0.5, "learning_rate": np.nan}, "a positive number"),
    ],
)
def test_mistakes_are_told(environment, options, message):
    with pytest.raises(ConfigError, match=message):
        warm_start(Config(environment=environment), jax.random.split(jax.random.key(0), 1), **options)
