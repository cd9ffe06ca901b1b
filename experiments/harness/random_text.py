"""An environment for measurements of token policies: prompts and completions of fixed lengths."""

import jax
import jax.numpy as jnp

from grpo_jax.environments import Environment
from grpo_jax.environments.environment import transition
from grpo_jax.environments.spaces import Discrete


def random_text(prompt_length: int, num_steps: int, vocab_size: int) -> Environment:
    """One prompt, and random rewards; completions end at the limit only, after `num_steps` tokens."""

    def reset(key, params):
        return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)

    def prompt(time, params):
        return (jnp.arange(prompt_length) * 7) % vocab_size

    def step(key, time, action, params):
        last = time + 1 >= num_steps
        return transition(time + 1, action, jax.random.normal(key) * last, False, last)

    observation, space = jax.ShapeDtypeStruct((), jnp.int32), Discrete(vocab_size)
    return Environment("random text", reset, step, {}, observation, space, None, num_steps, prompt=prompt)
