"""Tasks on numbers: addition, multiplication, modular arithmetic."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.environments.tokens.task import DIGITS, END, VOCABULARY, Task, digits, in_digits, join
from grpo_jax.errors import ConfigError

PLUS, MINUS, TIMES = (DIGITS + 10 + i for i in range(3))
SIGNS = "+-*"


def addition(num_digits: int = 2) -> Task:
    """The sum of two numbers of up to `num_digits` digits: 7+35= to 42$."""
    return _binary_operation("addition", num_digits, num_digits + 1, PLUS, jnp.add)


def multiplication(num_digits: int = 2) -> Task:
    """The product of two numbers of up to `num_digits` digits: 12*34= to 408$."""
    return _binary_operation("multiplication", num_digits, 2 * num_digits, TIMES, jnp.multiply)


def modular(modulus: int = 97) -> Task:
    """The sum, difference or product of two numbers, modulo `modulus`: 12-34= to 75$ modulo 97."""
    if not 2 <= modulus <= 10_000:
        raise ConfigError(f"modulus={modulus} must be from 2 to 10000, so that products fit into 32 bits")
    width = len(str(modulus - 1))

    def draw(key):
        key_numbers, key_sign = jax.random.split(key)
        a, b = jax.random.randint(key_numbers, 2, 0, modulus)
        return {"a": a, "b": b, "sign": jax.random.randint(key_sign, (), 0, 3)}

    def solution(problem):
        a, b = problem["a"], problem["b"]
        answer = jnp.stack([a + b, a - b, a * b])[problem["sign"]] % modulus
        return join(width + 1, digits(answer, width), END)

    return Task(
        name=f"modular-{modulus}",
        vocabulary=VOCABULARY + SIGNS,
        max_length=width + 1,
        draw=draw,
        prompt=lambda problem: _expression(problem["a"], PLUS + problem["sign"], problem["b"], width),
        solution=solution,
        well_formed=in_digits,
    )


def _binary_operation(name: str, num_digits: int, width: int, sign: int, operation: Callable) -> Task:
    if width > 9:
        raise ConfigError(f"{name}-{num_digits} has answers of {width} digits, but 32 bits hold 9; use fewer digits")
    return Task(
        name=f"{name}-{num_digits}",
        vocabulary=VOCABULARY + SIGNS,
        max_length=width + 1,
        draw=lambda key: jax.random.randint(key, 2, 0, 10**num_digits),
        prompt=lambda problem: _expression(problem[0], sign, problem[1], num_digits),
        solution=lambda problem: join(width + 1, digits(operation(*problem), width), END),
        well_formed=in_digits,
    )


def _expression(a: jax.Array, sign: jax.Array | int, b: jax.Array, width: int) -> jax.Array:
    return join(2 * width + 1, digits(a, width), sign, digits(b, width))
