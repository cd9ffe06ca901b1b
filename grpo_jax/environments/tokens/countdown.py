"""Countdown: combine given numbers into an expression with a given value."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments.tokens.task import DIGITS, END, PAD, VOCABULARY, Task, Tokens, digits, join
from grpo_jax.environments.tokens.tasks import MINUS, PLUS, SIGNS, TIMES
from grpo_jax.errors import ConfigError

COLON = TIMES + 1
MAX_NUMBERS = 6  # so that 9**6, the largest target, has six digits


class Problem(NamedTuple):
    """The numbers, the target, and one solution."""

    numbers: jax.Array  # [num_numbers] from 1 to 9, ascending
    target: jax.Array
    solution: Tokens


class Reading(NamedTuple):
    """State of the parser after some tokens of an expression. Its value so far is `total + term`."""

    total: jax.Array  # sum of all terms but the last
    term: jax.Array  # the last term, a product, so far, with its sign
    sign: jax.Array  # the last operator
    unused: jax.Array  # int32 [10]: how often each number may still be used; negative if used too often
    wants_number: jax.Array  # bool: the next token must be a number, as at the beginning and after an operator
    legal: jax.Array  # bool: no syntax error so far
    ended: jax.Array  # bool


def countdown(num_numbers: int = 3) -> Task:
    """Combine all the numbers, each once, with +, - and * to reach the target: 237:13= to 2*3+7$.

    A problem is drawn as a random solution. Any expression with the right value is correct; * binds before + and -.
    """
    if not 2 <= num_numbers <= MAX_NUMBERS:
        raise ConfigError(f"countdown-{num_numbers}: use from 2 to {MAX_NUMBERS} numbers")
    width = num_numbers  # digits of 9**num_numbers
    max_length = 2 * num_numbers  # numbers, the operators between them, and the end

    def read(problem: Problem, completion: Tokens) -> Reading:
        return _read(jnp.zeros(10, jnp.int32).at[problem.numbers].add(1), completion)

    def well_formed(problem, completion):
        reading = read(problem, completion)
        return reading.legal & reading.ended

    def correct(problem, completion):
        reading = read(problem, completion)
        solved = (reading.total + reading.term == problem.target) & jnp.all(reading.unused == 0)
        return solved & reading.legal & reading.ended

    def progress(problem, completion):
        reading = read(problem, completion)
        possible = reading.legal & jnp.all(reading.unused >= 0)
        return jnp.where(possible, 1 - jnp.sum(reading.unused) / num_numbers, 0.0)

    def draw(key):
        key_numbers, key_signs = jax.random.split(key)
        numbers = jax.random.randint(key_numbers, num_numbers, 1, 10)
        signs = jax.random.randint(key_signs, num_numbers, PLUS, TIMES + 1).at[-1].set(END)
        solution = jnp.stack([DIGITS + numbers, signs], axis=1).reshape(-1)
        reading = _read(jnp.zeros(10, jnp.int32), solution)
        return Problem(jnp.sort(numbers), reading.total + reading.term, solution)

    def prompt(problem):
        minus = jnp.where(problem.target < 0, MINUS, PAD)
        target = digits(jnp.abs(problem.target), width)
        return join(num_numbers + 2 + width, DIGITS + problem.numbers, COLON, minus, target)

    return Task(
        name=f"countdown-{num_numbers}",
        vocabulary=VOCABULARY + SIGNS + ":",
        max_length=max_length,
        draw=draw,
        prompt=prompt,
        solution=lambda problem: problem.solution,
        correct=correct,
        well_formed=well_formed,
        progress=progress,
    )


def _read(available: jax.Array, tokens: Tokens) -> Reading:
    """Parses tokens `[L]`; `available`, int32 `[10]`, is how often each number may be used."""

    def read(r: Reading, token: jax.Array) -> tuple[Reading, None]:
        number = token - DIGITS
        is_number, is_sign = (number >= 0) & (number < 10), (token >= PLUS) & (token <= TIMES)
        is_factor = r.sign == TIMES
        new_term = jnp.where(r.sign == MINUS, -number, number)
        after = Reading(
            total=jnp.where(is_number & ~is_factor, r.total + r.term, r.total),
            term=jnp.where(is_number, jnp.where(is_factor, r.term * number, new_term), r.term),
            sign=jnp.where(is_sign, token, r.sign),
            unused=r.unused - (is_number & (jnp.arange(10) == number)),
            wants_number=is_sign,
            legal=r.legal & jnp.where(r.wants_number, is_number, is_sign | (token == END)),
            ended=token == END,
        )
        ignored = r.ended | (token == PAD)
        return jax.tree.map(lambda old, new: jnp.where(ignored, old, new), r, after), None

    yes, no, zero = jnp.array(True), jnp.array(False), jnp.zeros((), jnp.int32)
    start = Reading(zero, zero, jnp.full((), PLUS, jnp.int32), available, yes, yes, no)
    return jax.lax.scan(read, start, tokens)[0]
