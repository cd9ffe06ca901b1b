"""Countdown: an expression of given numbers that has a given value."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments.tokens.arithmetic import MINUS, PLUS, SIGNS, TIMES
from grpo_jax.environments.tokens.task import DIGITS, END, PAD, VOCABULARY, Task, Tokens, digits, join
from grpo_jax.errors import ConfigError

COLON = TIMES + 1
MAX_NUMBERS = 6  # 9**6 is six digits long


class Problem(NamedTuple):
    """What is asked, and one of its answers."""

    numbers: jax.Array  # [num_numbers] from 1 to 9, ascending
    target: jax.Array
    solution: Tokens


class Reading(NamedTuple):
    """An expression that has been read up to some token: what is behind counts, products before sums."""

    total: jax.Array  # of the terms before the last
    term: jax.Array  # the last term so far, with its sign
    sign: jax.Array  # the operator that waits for its second number
    unused: jax.Array  # int32 [10], how often each number may still be used; negative once it was too often
    wants_number: jax.Array  # bool: at the start and after an operator
    legal: jax.Array  # bool: every token so far could stand where it stands
    ended: jax.Array  # bool


def countdown(num_numbers: int = 3) -> Task:
    """An expression of all the given numbers, each used once, with + - and *, of a given value: 237:13= to 2*3+7$.

    Problems are made from their solutions. Every right expression counts, and a product goes before a sum.
    """
    if not 2 <= num_numbers <= MAX_NUMBERS:
        raise ConfigError(f"countdown-{num_numbers}: use from 2 to {MAX_NUMBERS} numbers")
    width, max_length = num_numbers, 2 * num_numbers  # of 9**num_numbers; of numbers, operators and the end

    def read(problem: Problem, completion: Tokens) -> Reading:
        return _read(jnp.zeros(10, jnp.int32).at[problem.numbers].add(1), completion)

    def well_formed(problem, completion):
        reading = read(problem, completion)
        return reading.legal & reading.ended

    def correct(problem, completion):
        reading = read(problem, completion)
        right = (reading.total + reading.term == problem.target) & jnp.all(reading.unused == 0)
        return right & reading.legal & reading.ended

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
    """Reads tokens `[L]` as an expression of numbers of which some are available, int32 `[10]`."""

    def read(r: Reading, token: jax.Array) -> tuple[Reading, None]:
        number = token - DIGITS
        is_number, is_sign = (number >= 0) & (number < 10), (token >= PLUS) & (token <= TIMES)
        follows = r.sign == TIMES
        begun = jnp.where(r.sign == MINUS, -number, number)
        after = Reading(
            total=jnp.where(is_number & ~follows, r.total + r.term, r.total),
            term=jnp.where(is_number, jnp.where(follows, r.term * number, begun), r.term),
            sign=jnp.where(is_sign, token, r.sign),
            unused=r.unused - (is_number & (jnp.arange(10) == number)),
            wants_number=is_sign,
            legal=r.legal & jnp.where(r.wants_number, is_number, is_sign | (token == END)),
            ended=token == END,
        )
        nothing = r.ended | (token == PAD)
        return jax.tree.map(lambda old, new: jnp.where(nothing, old, new), r, after), None

    yes, no, zero = jnp.array(True), jnp.array(False), jnp.zeros((), jnp.int32)
    start = Reading(zero, zero, jnp.full((), PLUS, jnp.int32), available, yes, yes, no)
    return jax.lax.scan(read, start, tokens)[0]
