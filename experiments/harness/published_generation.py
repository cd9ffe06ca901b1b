"""Generation by the package transformers, beside which ours is measured. Needs torch."""

import jax.numpy as jnp

from grpo_jax.errors import ConfigError
from grpo_jax.policies import Transformer

from .workloads import Case


def transformers_case(
    architecture: Transformer, vocab_size: int, prompts: int, prompt_length: int, group_size: int, num_steps: int
) -> Case:
    """Sampled completions of equal lengths by a Llama of the same sizes, with random weights.

    Args:
      architecture: the sizes.
      vocab_size: number of different tokens.
      prompts, prompt_length: number of prompts, and tokens of each.
      group_size: completions of each prompt.
      num_steps: tokens of a completion.

    Raises:
      ConfigError: torch or transformers is not installed.
    """
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigError(f"--transformers needs two packages: pip install torch transformers ({error})") from error
    size = architecture.sizes
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=architecture.width,
        intermediate_size=size.feedforward,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, architecture.compute_dtype)).eval()
    texts = torch.arange(prompts * prompt_length).reshape(prompts, prompt_length) % vocab_size
    options = {"do_sample": True, "num_return_sequences": group_size, "max_new_tokens": num_steps}

    def generate(state, fixed, n):
        for _ in range(int(n) + 1):
            tokens = model.generate(texts, attention_mask=torch.ones_like(texts), **options)
        return jnp.asarray(tokens.numpy())

    num_samples = prompts * group_size * num_steps
    return Case("transformers", generate, None, None, num_samples, float("nan"), 0.0, 0)
