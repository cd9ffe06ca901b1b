"""Language models from folders: prompts and chats, rewards in Python, an environment, and folders of trained models."""

from grpo_jax.language.chat import ChatTemplate
from grpo_jax.language.completions import CompletionFile
from grpo_jax.language.environment import language_environment
from grpo_jax.language.folder import load_architecture
from grpo_jax.language.models import LanguageModel, load_model
from grpo_jax.language.prompts import Prompts, as_prompts, encode_prompts, read_prompts, split_held_out
from grpo_jax.language.rewards import Reward, RewardError, load_reward, overlong
from grpo_jax.language.saving import make_tiny_model, save_adapter, save_model, save_trained
from grpo_jax.language.task import LanguageTask
from grpo_jax.language.tokenizer import Tokenizer, load_tokenizer
from grpo_jax.language.weights import load_params

__all__ = ["ChatTemplate", "CompletionFile", "LanguageModel", "LanguageTask", "Prompts", "Reward", "RewardError"]
__all__ += ["Tokenizer", "as_prompts", "encode_prompts", "language_environment", "load_architecture", "load_model"]
__all__ += ["load_params", "load_reward", "load_tokenizer", "make_tiny_model", "overlong", "read_prompts"]
__all__ += ["save_adapter", "save_model", "save_trained", "split_held_out"]
