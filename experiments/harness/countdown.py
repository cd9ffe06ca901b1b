"""Countdown, a task of the study of token tasks: combine given numbers into an expression with a given value."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments.tokens import DIGITS, END, PAD, VOCABULARY, Task, digits, join
from grpo_jax.environments.tokens.tasks import MINUS, PLUS, SIGNS, TIMES

COLON = TIMES + 1


class Problem(NamedTuple):
    numbers: jax.Array  # [num_numbers] from 1 to 9, ascending
    target: jax.Array
    solution: jax.Array


def countdown(num_numbers: int = 3) -> Task:
    """Combine all the numbers, each once, with +, - and * to reach the target: 237:13= to 2*3+7$.

    A problem is drawn as a random solution. Any expression with the right value is correct; * binds before + and -.
    """

    def draw(key):
        key_numbers, key_signs = jax.random.split(key)
        numbers = jax.random.randint(key_numbers, num_numbers, 1, 10)
        signs = jax.random.randint(key_signs, num_numbers, PLUS, TIMES + 1).at[-1].set(END)
        solution = jnp.stack([DIGITS + numbers, signs], axis=1).reshape(-1)
        return Problem(jnp.sort(numbers), _value(numbers, signs), solution)

    def prompt(problem):
        minus = jnp.where(problem.target < 0, MINUS, PAD)
        target = digits(jnp.abs(problem.target), num_numbers)  # at most 9**num_numbers
        return join(2 * num_numbers + 2, DIGITS + problem.numbers, COLON, minus, target)

    def read(completion):
        """The numbers, the sign or the end after each, and whether they are an expression that ends."""
        numbers, signs = completion[::2] - DIGITS, completion[1::2]
        is_end, is_sign = signs == END, (signs >= PLUS) & (signs <= TIMES)
        is_over = jnp.cumsum(is_end) > is_end
        legal = (numbers >= 0) & (numbers < 10) & (is_sign | is_end)
        return numbers, signs, jnp.all(legal | is_over) & jnp.any(is_end)

    def well_formed(problem, completion):
        return read(completion)[2]

    def correct(problem, completion):
        numbers, signs, legal = read(completion)
        return legal & jnp.all(jnp.sort(numbers) == problem.numbers) & (_value(numbers, signs) == problem.target)

    def solution(problem):
        return problem.solution

    name, vocabulary = f"countdown-{num_numbers}", VOCABULARY + SIGNS + ":"
    return Task(name, vocabulary, 2 * num_numbers, draw, prompt, solution, correct, well_formed)


def _value(numbers: jax.Array, signs: jax.Array) -> jax.Array:
    """The value of an expression of all these numbers, each with the sign after it."""
    total, term, before = 0, 0, PLUS  # the value so far is total + term, a product
    for number, sign in zip(numbers, signs, strict=True):
        is_factor = before == TIMES
        total = jnp.where(is_factor, total, total + term)
        term = jnp.where(is_factor, term * number, jnp.where(before == MINUS, -number, number))
        before = sign
    return total + term
