"""Tasks on sequences of digits: sorting, reversal, parity with a scratch pad."""

import jax
import jax.numpy as jnp

from grpo_jax.environments.tokens.task import DIGITS, END, PAD, VOCABULARY, Task, Tokens, in_digits, join


def sort(length: int = 5) -> Task:
    """Digits in ascending order: 31415= to 11345$."""
    return Task(
        name=f"sort-{length}",
        vocabulary=VOCABULARY,
        max_length=length + 1,
        draw=lambda key: jax.random.randint(key, length, 0, 10),
        prompt=lambda problem: DIGITS + problem,
        solution=lambda problem: join(length + 1, DIGITS + jnp.sort(problem), END),
        well_formed=in_digits,
    )


def reverse(length: int = 6) -> Task:
    """One to `length` digits in reverse order: 3141= to 1413$."""
    return Task(
        name=f"reverse-{length}",
        vocabulary=VOCABULARY,
        max_length=length + 1,
        draw=lambda key: _ragged_digits(key, length, 10),
        prompt=lambda problem: problem,
        solution=lambda problem: join(length + 1, problem[::-1], END),
        well_formed=in_digits,
    )


def parity(length: int = 8) -> Task:
    """The running parity of up to `length` bits, whose last bit is the answer: 1011= to 1101$.

    A completion is correct if it has as many bits as the prompt and the last is their parity. `progress` checks the
    bits before it, too.
    """

    def correct(problem: Tokens, completion: Tokens):
        last = jnp.sum(problem != PAD) - 1
        answer = jnp.sum(problem == DIGITS + 1) % 2
        return (completion[last] == DIGITS + answer) & (completion[last + 1] == END)

    def solution(problem: Tokens) -> Tokens:
        running = DIGITS + jnp.cumsum(problem == DIGITS + 1) % 2
        return join(length + 1, jnp.where(problem == PAD, PAD, running), END)

    return Task(
        name=f"parity-{length}",
        vocabulary=VOCABULARY[: DIGITS + 2],
        max_length=length + 1,
        draw=lambda key: _ragged_digits(key, length, 2),
        prompt=lambda problem: problem,
        solution=solution,
        correct=correct,
        well_formed=in_digits,
    )


def _ragged_digits(key: jax.Array, length: int, base: int) -> Tokens:
    """One to `length` random digits, then `PAD`: `[length]`."""
    key_length, key_digits = jax.random.split(key)
    is_digit = jnp.arange(length) < jax.random.randint(key_length, (), 1, length + 1)
    return jnp.where(is_digit, DIGITS + jax.random.randint(key_digits, length, 0, base), PAD)
