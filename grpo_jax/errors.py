"""The error for configurations that cannot run, and helpers for its message."""

import contextlib
import difflib
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np

LARGEST_COUNT = 2**31 - 1


class ConfigError(ValueError):
    """A configuration that cannot run. The message says what is wrong, why, and what to write instead."""


class HostError(ConfigError):
    """An error in the user's own Python code; the cause has the frames of that code."""


def as_count(name: str, value: Any, why: str = "") -> int:
    """A positive integer (Python's or NumPy's) of at most 2^31 - 1, the largest int32, as an int.

    Raises:
      ConfigError: for any other value; the message has `name` and the reason `why`.
    """
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count > LARGEST_COUNT:
        raise ConfigError(f"{name}={count} is more than {LARGEST_COUNT}, the largest int32; use fewer")
    if count >= 1:
        return count
    reason = f": {why}" if why else ""
    hint = f"write {value:.0f}" if isinstance(value, float) and value >= 1 and value.is_integer() else "use 1 or more"
    raise ConfigError(f"{name}={value!r} is not a positive integer{reason}; {hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """For messages about an unknown name: the known names that are most similar to it, or all if none is."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)
    if not close:
        return "known: " + ", ".join(known)
    return "did you mean " + " or ".join(repr(folded[name]) for name in close) + "?"


def check_arguments(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first argument of a function that it does not have, with the nearest one."""
    for name in given:
        if name not in known:
            field = OTHER_WORDS.get(name.lower())
            advice = f"it is {field} here" if field in known else nearest(name, known)
            raise ConfigError(f"unknown argument {name!r} of {function}: {advice}")


# The words of purejaxrl, CleanRL, Stable-Baselines3, rejax, brax, skrl, TRL and verl.
_WORDS = {
    "clip_high": "clip clip_eps clip_coef clip_range clip_ratio clipping_epsilon epsilon epsilon_high",
    "learning_rate": "lr actor_learning_rate",
    "schedule": "lr_schedule learning_rate_schedule lr_scheduler_type",
    "final_learning_rate": "anneal_lr",
    "warmup": "warmup_ratio",
    "discount": "gamma discounting",
    "gae_lambda": "lam lambda_",
    "clip_low": "epsilon_low",
    "value_clip": "clip_range_vf",
    "entropy_coef": "ent_coef entropy_cost",
    "entropy_target": "target_entropy",
    "value_coef": "vf_coef vf_loss_coefficient",
    "kl_coef": "beta kl_penalty",
    "kl_limit": "target_kl",
    "total_steps": "total_timesteps num_timesteps",
    "num_iterations": "max_steps",
    "num_envs": "n_envs num_environments",
    "num_steps": "n_steps unroll_length rollout_length",
    "num_epochs": "n_epochs update_epochs num_updates_per_batch ppo_epochs",
    "num_minibatches": "n_minibatch",
    "group_size": "num_generations",
    "num_microbatches": "gradient_accumulation_steps",
    "environment": "env env_id env_name",
    "env_params": "env_kwargs",
    "algorithm": "algo",
    "network": "policy_kwargs",
    "hidden_sizes": "hidden_layer_sizes net_arch",
    "normalize_rewards": "normalize_reward",
    "normalize_observations": "normalize_obs",
}
OTHER_WORDS = {word: field for field, words in _WORDS.items() for word in words.split()}
"""What other libraries call a field."""


class KnownFields:
    """A dataclass whose constructor says what to write for a field that it does not have."""

    _classes: ClassVar[list[type]] = []  # all of these, in which a field is looked for

    def __init_subclass__(cls, **options: Any) -> None:
        cls.__repr__ = cls.__dict__.get("__repr__", KnownFields.__repr__)  # first: a dataclass would make its own
        super().__init_subclass__(**options)
        KnownFields._classes.append(cls)

    def __new__(cls, *arguments: Any, **fields: Any) -> Any:
        """Raises ConfigError for an unknown field."""
        for name, value in fields.items():
            if name not in cls.__dataclass_fields__:
                raise ConfigError(cls._unknown_field(name, value))
        return super().__new__(cls)

    @staticmethod
    def owner(field: str) -> type | None:
        """The first class that was made with a field of this name."""
        classes = (each for each in KnownFields._classes if field in getattr(each, "__dataclass_fields__", ()))
        return next(classes, None)

    @classmethod
    def _unknown_field(cls, name: str, value: Any) -> str:
        field = OTHER_WORDS.get(name.lower(), name)
        same = f"{name} is {field} here, " if field != name else f"{name} is "
        if field in cls.__dataclass_fields__:
            return f"{cls.__name__} has no field {name!r}: {same.removesuffix(', ')}; write {field}={value!r}"
        if owner := KnownFields.owner(field):
            return f"{same}a field of {owner.__name__}: {owner.__name__}({field}={value!r})"
        return f"{cls.__name__} has no field {name!r}: {nearest(name, cls.__dataclass_fields__)}"

    def _changed(self) -> dict[str, Any]:
        """The fields that are not the defaults."""
        shown = {name: (getattr(self, name), field.default) for name, field in self.__dataclass_fields__.items()}
        return {name: value for name, (value, default) in shown.items() if hasattr(value, "dtype") or value != default}

    def __repr__(self) -> str:
        """Of arrays, whose numbers could fill screens, the types and ranges."""
        fields = ", ".join(f"{name}={describe_value(value)}" for name, value in self._changed().items())
        return f"{type(self).__name__}({fields})"


def function_name(function: Any) -> str:
    """Its name, of a custom one with its module, or how it describes itself, such as `outcome(group_centered)`."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None) or "__main__"
    if name is None:
        return re.sub(r" at 0x\w+", "", repr(function))
    return name if module == "__main__" or module.startswith("grpo_jax.") else f"{module}:{name}"


def describe_arrays(tree: Any) -> str:
    """Dtypes and shapes, such as float32[3, 2]."""
    described = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
    return described if isinstance(described, str) else str(described).replace("'", "")


def describe_value(value: Any) -> str:
    """As `repr`; of an array its dtype and shape, and the range of its numbers where they are known."""
    if not hasattr(value, "dtype") or isinstance(value, jax.core.Tracer) or not value.size:
        return describe_arrays(value) if hasattr(value, "dtype") else repr(value)
    low, high = np.min(value), np.max(value)
    return f"{low:g}" if low == high else f"{describe_arrays(value)} from {low:g} to {high:g}"


def are_alike(tree: Any, other: Any) -> bool:
    """Whether two trees of arrays have the same structure, shapes and dtypes."""
    first, second = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(each)] for each in (tree, other))
    return jax.tree.structure(tree) == jax.tree.structure(other) and first == second


@contextlib.contextmanager
def user_code(what: str, advice: str = "") -> Iterator[None]:
    """Any error of the block, which calls code of the user, is a ConfigError: "WHAT with TypeError: ...ADVICE"."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} with {type(error).__name__}: {first_line(error)}{advice}") from error


def in_short(error: Exception) -> str:
    """An error's message; JAX's for a tracer in Python's `if` or in NumPy is one line, with what to write instead."""
    if not isinstance(error, jax.errors.JAXTypeError):
        return str(error) or type(error).__name__
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return f"{first_line(error)}; return it in the state, as what self keeps is of another trace"
    return f"{first_line(error)}; it is traced: write jnp.where or jax.lax.cond for `if`, and jnp for numpy"


def with_own_frames(error: BaseException) -> BaseException:
    """The error with its traceback from the first frame outside of this package and JAX."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in ("grpo_jax", "jax"):
        trace = trace.tb_next
    return error.with_traceback(trace)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
