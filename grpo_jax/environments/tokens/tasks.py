"""Tasks on digits: sorting, addition, and a calculator within completions."""

import jax
import jax.numpy as jnp

from grpo_jax.environments.tokens.task import DIGITS, END, PAD, VOCABULARY, Task, Tokens, digits, in_digits, join
from grpo_jax.errors import ConfigError

PLUS, MINUS, TIMES = (DIGITS + 10 + i for i in range(3))
SIGNS = "+-*"


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


def addition(num_digits: int = 2) -> Task:
    """The sum of two numbers of up to `num_digits` digits: 7+35= to 42$."""
    width = num_digits + 1
    if width > 9:
        raise ConfigError(f"addition-{num_digits} has answers of {width} digits, but 32 bits hold 9; use fewer digits")

    def prompt(problem):
        a, b = (digits(number, num_digits) for number in problem)
        return join(2 * num_digits + 1, a, PLUS, b)

    return Task(
        name=f"addition-{num_digits}",
        vocabulary=VOCABULARY + SIGNS,
        max_length=width + 1,
        draw=lambda key: jax.random.randint(key, 2, 0, 10**num_digits),
        prompt=prompt,
        solution=lambda problem: join(width + 1, digits(jnp.sum(problem), width), END),
        well_formed=in_digits,
    )


CALL = TIMES + 1
MAX_DIGITS = 3  # a product of 2N by N digits then has at most nine, which fit into int32


def calculator(num_digits: int = 2) -> Task:
    """The product of two numbers plus a third, with a calculator: 12*34+56= to 12*34?408+56?464$.

    After `?` the environment writes the sum or the product of the two numbers before it, the first with up to 2N digits
    and the second with up to N. It writes nothing if there are none. A completion is correct if the number before its
    end is the answer, whoever wrote it.

    Args:
      num_digits: `N`, the most digits of each of the three numbers.

    Raises:
      ConfigError: for more digits than fit into 32 bits.
    """
    if num_digits > MAX_DIGITS:
        raise ConfigError(f"calculator-{num_digits} has products that exceed 32 bits; use up to {MAX_DIGITS} digits")
    width = 2 * num_digits  # digits of (10**N - 1)**2 + 10**N - 1
    max_length = 3 * num_digits + 2 * width + 5

    def draw(key):
        return jax.random.randint(key, 3, 0, 10**num_digits)

    def prompt(problem):
        a, b, c = (digits(number, num_digits) for number in problem)
        return join(3 * num_digits + 2, a, TIMES, b, PLUS, c)

    def solution(problem):
        a, b, c = (digits(number, num_digits) for number in problem)
        product = problem[0] * problem[1]
        first = (a, TIMES, b, CALL, digits(product, width))
        return join(max_length, *first, PLUS, c, CALL, digits(product + problem[2], width), END)

    def correct(problem, completion):
        answer, length, _ = _number_before(completion, jnp.argmax(completion == END))
        return jnp.any(completion == END) & (length > 0) & (answer == problem[0] * problem[1] + problem[2])

    def forced_token(problem, completion):
        place = jnp.arange(max_length)
        call = jnp.max(jnp.where(completion == CALL, place, -1))
        right, right_length, sign = _number_before(completion, call)
        left, left_length, _ = _number_before(completion, sign)
        operation = completion[sign]
        is_number = (0 < right_length) & (right_length <= num_digits) & (0 < left_length) & (left_length <= width)
        is_call = (call >= 0) & is_number & ((operation == PLUS) | (operation == TIMES))
        value = jnp.where(operation == PLUS, left + right, left * right)
        reply = join(3 * num_digits, digits(value, 3 * num_digits))
        num_written = jnp.sum(completion != PAD) - call - 1
        return jnp.where(is_call, reply.at[num_written].get(mode="fill", fill_value=PAD), PAD)

    def well_formed(problem, completion):
        return jnp.any(completion == END) & (_number_before(completion, jnp.argmax(completion == END))[1] > 0)

    name, vocabulary = f"calculator-{num_digits}", VOCABULARY + SIGNS + "?"
    return Task(name, vocabulary, max_length, draw, prompt, solution, correct, well_formed, forced_token=forced_token)


def _number_before(tokens: Tokens, end: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The number whose digits end before the index `end`, the number of these digits, and the index before them.

    A number of more than nine digits is wrong, as it may not fit into int32. The index is -1 if the digits begin at 0.
    """
    place = jnp.arange(tokens.shape[0])
    is_digit = (tokens >= DIGITS) & (tokens < DIGITS + 10)
    before = jnp.max(jnp.where(~is_digit & (place < end), place, -1))
    powers = 10 ** jnp.clip(end - 1 - place, 0, 9)
    number = jnp.sum(jnp.where((place > before) & (place < end), (tokens - DIGITS) * powers, 0))
    return number, end - 1 - before, before
