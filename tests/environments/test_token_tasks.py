"""Token tasks: prompts, solutions, correct completions, rewards, and held-out prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.environments import make_environment
from grpo_jax.environments import tokens as lib
from grpo_jax.environments.tokens import PAD, Reward, Task, make_task, progress, text, well_formed
from grpo_jax.environments.tokens.environment import _held_out
from grpo_jax.runs.imitation import _is_forced

KEYS, JUDGES = jax.random.split(jax.random.key(0), 200), (lib.accuracy, well_formed, progress)


def tokens(task, written, length=None):
    """A text as tokens, padded on the right."""
    found = [task.vocabulary.index(character) for character in written]
    return jnp.array(found + [PAD] * ((length or task.max_length) - len(found)))


def answer(kind, prompt):
    """The answer to a task's prompt, computed in Python."""
    if kind == "sort":
        return "".join(sorted(prompt))
    if kind == "addition":
        return str(sum(map(int, prompt.split("+"))))
    product, last = prompt.split("+")
    value = int(product.split("*")[0]) * int(product.split("*")[1])
    return f"{product}?{value}+{last}?{value + int(last)}"


@pytest.mark.parametrize("kind", ["addition", "calculator", "sort"])
def test_solutions_answer_their_prompts(kind):
    task = make_task(kind)

    @jax.jit
    @jax.vmap
    def draw(key):
        problem = task.draw(key)
        solution = task.solution(problem)
        judged = [judge(task, problem, solution) for judge in JUDGES]
        return task.prompt(problem), solution, jnp.stack(judged)

    prompts, solutions, judged = jax.tree.map(np.asarray, draw(KEYS))
    np.testing.assert_array_equal(judged, 1.0)
    assert len({text(task, prompt) for prompt in prompts}) > 50
    for prompt, solution in zip(prompts, solutions, strict=True):
        asked, written = text(task, prompt), text(task, solution)
        assert written.endswith("$") and written.count("$") == 1
        assert written == answer(kind, asked) + "$"
    assert (solutions == PAD).any() == (kind != "sort")


TWO_PROMPTS = Task(
    name="two",
    vocabulary="$=0123",
    max_length=4,
    draw=lambda key: jnp.where(jax.random.bernoulli(key), jnp.array([3, 4, PAD]), jnp.array([2, 2, 2])),  # 12 or 000
    prompt=lambda problem: problem,
    solution=lambda problem: jnp.array([4, 3, 0, PAD]),
)


def test_a_completion_is_paid_a_weighted_sum_of_rewards():
    def overlong(task, problem, completion):
        return lib.overlong_punishment(jnp.sum(completion != PAD), max_length=task.max_length, buffer=2)

    gated, late = Reward("gated", lib.gated(progress, well_formed)), Reward("overlong", overlong, weight=9)
    rewards = lib.ACCURACY, lib.FORMAT, lib.PROGRESS, gated, late
    task = TWO_PROMPTS._replace(rewards=rewards)
    env = make_environment(task, {"overlong": 0.5})
    params = {name: jnp.asarray(value) for name, value in env.params.items()}
    start, observation = env.reset(KEYS[0], params)
    assert (observation, observation.dtype) == (1, jnp.int32)
    start = start._replace(problem=jnp.array([3, 4, PAD]))
    completions = jnp.stack([tokens(task, written) for written in ("21$", "12$", "$", "2111")])

    @jax.jit
    @jax.vmap
    def play(completion):
        def step(state, action):
            moved = env.step(None, state, jnp.maximum(action, 0), params)
            after = jax.tree.map(lambda new, old: jnp.where(action == PAD, old, new), moved.state, state)
            return after, moved._replace(state=())

        return jax.lax.scan(step, start, completion)

    ends, moved = play(completions)
    weights = {name: jnp.repeat(value, 4) for name, value in params.items()}
    outcome = jax.jit(env.outcome)(ends, weights)
    terminated, truncated = moved.terminated & (completions != PAD), moved.truncated & (completions != PAD)
    assert terminated.tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert truncated.tolist() == [[0] * 4] * 3 + [[0, 0, 0, 1]]
    np.testing.assert_array_equal(jnp.where(completions != PAD, moved.observation, PAD), completions)
    np.testing.assert_allclose(
        moved.reward_parts.values.sum(axis=1, where=completions[..., None] != PAD), [[1], [1 / 3], [0], [2 / 3]]
    )
    np.testing.assert_allclose(outcome.values, [[1, 1, 1, -0.5], [0, 1, 1 / 3, -0.5], [0, 1, 0, 0], [0, 0, 0, -1]])
    np.testing.assert_allclose(outcome.weights, [[1, 0.1, 1, 0.5]] * 4)
    np.testing.assert_allclose(moved.reward[0], [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)


def test_training_never_draws_a_held_out_prompt():
    fast_keys = jax.random.split(jax.random.key(0, impl="rbg"), 200)
    for task, keys in ((TWO_PROMPTS, KEYS), (make_task("sort-5"), fast_keys)):
        env = make_environment(task)
        prompts = []
        for held_out in (0, 1):
            params = {name: jnp.asarray(value) for name, value in env.params.items()} | {"held_out": held_out}
            reset = jax.jit(jax.vmap(lambda key: env.prompt(env.reset(key, params)[0], params)))  # noqa: B023
            prompts.append({tuple(prompt) for prompt in np.asarray(reset(keys)).tolist()})
        assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]
        if task.name == "sort-5":
            assert len(prompts[1]) > 190  # many, not a few


def test_the_held_out_prompts_never_change():
    task = make_task("sort-5")
    held_out = _held_out(task.draw, task.prompt)
    prompts = np.stack(np.unravel_index(np.arange(10**5, dtype=np.int32), (10,) * 5), axis=1).astype(np.int32)
    assert np.sum(jax.jit(jax.vmap(held_out))(prompts)) == 9699


def test_the_calculator_answers_calls_within_a_completion():
    task, problem = make_task("calculator-2"), jnp.array([12, 34, 56])
    solution = "12*34?408+56?464$"
    replies = {solution[:i]: solution[i] if 6 <= i < 9 or 13 <= i < 16 else "" for i in range(17)}
    replies |= {"99*99?980": "1", "0*7?": "0", "1+2+3?": "5", "1234+1?12": "3"}
    replies |= dict.fromkeys(("?", "*3?", "3*?", "4+123?", "12345+1?"), "")
    verdicts = {solution: 1, "464$": 1, solution[:-1]: 0, "1464$": 0, "$": 0}

    @jax.jit
    @jax.vmap
    def judge(completion):
        return task.forced_token(problem, completion), task.correct(problem, completion)

    written = [*replies, *verdicts]
    forced, correct = jax.tree.map(np.asarray, judge(jnp.stack([tokens(task, each) for each in written])))
    assert dict(zip(replies, (text(task, token) for token in forced), strict=False)) == replies
    assert dict(zip(verdicts, correct[len(replies) :], strict=True)) == verdicts
    by_calculator = jax.jit(lambda solution: _is_forced(task, problem, solution))(tokens(task, solution))
    assert by_calculator[:17].tolist() == [replies[solution[:i]] != "" for i in range(17)]
