"""`tuned`: the config and the hyperparameters that are known to work for an environment and an algorithm."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_jax.algorithms import Algorithm, automatic_algorithm, by_name
from grpo_jax.config import Config
from grpo_jax.environments import make_environment
from grpo_jax.environments.parameters import static_parameters
from grpo_jax.errors import ConfigError, KnownFields, check_arguments
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import is_custom
from grpo_jax.policies.networks import CNN, MLP, Transformer, resolve_network
from grpo_jax.runs.tuned_settings import tuned_settings
from grpo_jax.training.checks import changed, unread_fields


@dataclasses.dataclass(frozen=True)
class NetworkFields(Transformer, CNN):
    """The fields of all networks, of which one uses its own."""


def tuned(
    environment: Any = Config.environment, algorithm: str | Algorithm = Config.algorithm, **fields: Any
) -> tuple[Config, Hyperparams]:
    """The config and the hyperparameters that `grpo-jax train` has for an environment and an algorithm.

    ```python
    import jax
    from grpo_jax import run, tuned

    config, hyperparams = tuned("CartPole-v1", "ppo", total_steps=80_000)
    result = run(config, hyperparams, jax.random.split(jax.random.key(0), 4))
    ```

    `sweep(config, values, hyperparams=hyperparams)` takes them too. They suit two CPU cores; the command also enlarges
    them on a GPU, for long runs.

    Args:
      environment, algorithm: as in `Config`. An environment without tuned settings, such as a custom one, has those of
        the algorithm; a custom algorithm has those of its kind: of PPO, of anchored groups or of GRPO.
      fields: of `Config`, of the network or of the algorithm's hyperparameters, in place of the tuned ones. Parameters
        of the environment are merged one by one; `network="auto"` is the tuned one.
    """
    env_params = dict(static_parameters(fields.get("env_params", ())))
    if algorithm == "auto":
        algorithm = automatic_algorithm(make_environment(environment, env_params).prompt is not None)[0]
    algorithm = algorithm if isinstance(algorithm, Algorithm) else by_name(str(algorithm))
    known = (kind.__dataclass_fields__ for kind in (Config, NetworkFields, algorithm.hyperparams))
    check_arguments("tuned", (name for name in fields if KnownFields.owner(name) is None), {*itertools.chain(*known)})
    settings = without_replaced(tuned_settings(environment, algorithm), fields)
    merged = settings | fields
    if env_params:
        merged["env_params"] = settings.get("env_params", {}) | env_params
    if merged.get("network") == "auto":
        merged["network"] = settings.get("network", "auto")
    static, traced = split_fields(environment, merged)
    config = Config(environment=environment, algorithm=algorithm, **static)
    hyperparams = config.hyperparams_class(**traced)
    return config, without_unread(config, hyperparams, traced.keys() - fields.keys())


def without_replaced(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings beside given fields: without the layers of another kind of network, and without another budget."""
    replaced = set()
    if is_custom(network := given.get("network", "auto")) or network == "transformer":
        replaced |= NetworkFields.__dataclass_fields__.keys()
    if given.get("total_steps") is not None or given.get("num_iterations") is not None:
        replaced |= {"total_steps", "num_iterations"}
    return {name: value for name, value in settings.items() if name not in replaced}


def split_fields(environment: Any, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of `Config`, with a network that has the network's fields, and the fields of `Hyperparams`."""
    static = {name: value for name, value in fields.items() if name in Config.__dataclass_fields__}
    own = {name: value for name, value in fields.items() if name in NetworkFields.__dataclass_fields__}
    if own:
        network, shown = static.get("network", Config.network), (None, False)
        if network == "auto":  # only then is the environment asked, which may take seconds to make
            env = make_environment(environment, dict(static.get("env_params", ())))
            shown = env.observation, env.prompt is not None
        if not isinstance(network := resolve_network(network, *shown), MLP | Transformer):
            name, value = next(iter(own.items()))
            raise ConfigError(f"{name}={value!r} has no effect on a custom network; leave it out, and set it there")
        static["network"] = dataclasses.replace(network, **own)
    return static, {name: value for name, value in fields.items() if name not in static.keys() | own.keys()}


def without_unread(config: Config, hyperparams: Hyperparams, names: Iterable[str]) -> Hyperparams:
    """The hyperparameters; those of these names that nothing reads get their defaults, as presets are for many runs."""
    values = changed(hyperparams)
    unread = unread_fields(config, hyperparams, [name for name in names if name in values])
    return hyperparams.replace(**{name: hyperparams.__dataclass_fields__[name].default for name in unread})
