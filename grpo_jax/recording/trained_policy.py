"""Trained policies: what acts, and how it is read from the folder of a run."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.config import Config, kept_with
from grpo_jax.environments import row_parameters
from grpo_jax.environments.casting import exact_leaves
from grpo_jax.errors import ConfigError, describe_arrays
from grpo_jax.evaluation.episodes import choose_actions
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies.normalization import Normalizer
from grpo_jax.recording.config_file import FIELDS, from_json
from grpo_jax.recording.files import Arrays, as_numbers, as_path, read_archive
from grpo_jax.recording.metrics_file import as_setting
from grpo_jax.recording.policy_saver import KINDS, find_run
from grpo_jax.runs.run_spec import Settings, setting_columns, settings_of
from grpo_jax.training.train import make_init
from grpo_jax.types import PyTree, TrainState, by_path


@functools.partial(struct.dataclass, repr=False)
class TrainedPolicy:
    """A trained policy, or the policies of all rows of a run: a pytree, whose leaves then have a leading axis `[R]`.

    ```python
    policy = grpo_jax.load("runs/mine")
    action = policy.act(observation)
    returns = evaluate(policy.config, policy.state(key), key).returns
    ```
    """

    name: str = struct.field(pytree_node=False)  # of the run
    config: Config = struct.field(pytree_node=False)
    params: PyTree
    normalizer: Normalizer
    hyperparams: Hyperparams
    env_params: dict[str, jax.Array]  # parameters of the environment that the run gave to this row
    score: jax.Array  # mean return of an evaluation, or else of recent training episodes; NaN if none had ended
    steps: jax.Array  # environment steps it was trained for
    row: jax.Array  # its number in the run, from 0

    def __repr__(self) -> str:
        rows = f"{len(self)} rows" if np.ndim(self.row) else f"row {self.row}"
        return f"TrainedPolicy({self.name!r}, {rows}, score={np.round(self.score, 2)})"

    def __len__(self) -> int:
        """Number of rows; TypeError for a single policy."""
        return len(self.row)

    @property
    def settings(self) -> Settings:
        """Which of the rows have the same hyperparameters and env_params: `policies.settings.rows`."""
        return settings_of(setting_columns(self.hyperparams, self.env_params, self.config.env.params), len(self))

    def __getitem__(self, row: int) -> "TrainedPolicy":
        """The policy of one of the rows."""
        if not np.ndim(self.row):
            raise ConfigError("this is a single policy already; load(folder, row='all') gives all of them")
        return jax.tree.map(lambda leaf: leaf[row], self)

    def act(
        self,
        observation: PyTree,
        key: jax.Array | None = None,
        *,
        carry: PyTree = None,
        action_mask: jax.Array | None = None,
    ) -> Any:
        """The action for an observation, or the actions for a batch of them, as the environment takes them.

        Args:
          observation: one, or a batch `[N, ...]`, as the environment gives it, such as the integer of a `Discrete`
            space.
          key: samples the action; None takes the most probable one.
          carry: of a recurrent policy: from `initial_carry` at the start of an episode, then from the call before.
          action_mask: bool `[num_actions]` or `[N, num_actions]`, the legal actions, if the environment has masks.

        Returns:
          The action, `[...]` or `[N, ...]`; with a carry, the action and the next carry.

        Raises:
          ConfigError: the observation has another shape or type, a recurrent policy has no carry, the carry or the mask
            is missing or that of another number of observations, or there are several rows.
        """
        if np.ndim(self.row):
            raise ConfigError(f"these are the policies of {len(self)} rows; take one of them, policy[0]")
        if carry is None and self.config.policy.has_carry:
            instead = "action, carry = policy.act(observation, carry=carry), with policy.initial_carry() at first"
            if self.config.is_transformer:
                instead = "generate(policy.config.policy, policy.params, prompts, key), or answer(policy.config, ...)"
            raise ConfigError(f"this policy keeps a carry from step to step: write {instead}")
        observation, is_single = _as_observation(self.config, observation)
        if is_single:
            observation = jax.tree.map(lambda leaf: leaf[None], observation)
        num = len(jax.tree.leaves(observation)[0])
        if action_mask is not None:
            action_mask = _as_action_mask(self.config, action_mask, num, is_single)
        elif self.config.env.action_mask is not None:
            raise ConfigError(f"{self.config.env.name!r} has masks: write policy.act(observation, action_mask=mask)")
        before = self.initial_carry(num) if carry is None else carry
        for leaf in jax.tree.leaves(before):
            if leaf.shape[:1] != (num,):  # a single carry would be broadcast to all observations
                raise ConfigError(
                    f"the carry contains {describe_arrays(leaf)}, but a batch of {num} keeps a carry for each "
                    f"observation, [{num}, ...]; begin with policy.initial_carry({num})"
                )
        arrays = self.params, self.normalizer, self.hyperparams
        # Rows of a run share compiled programs.
        program = kept_with(self.config, ("act",), lambda: jax.jit(functools.partial(choose_actions, self.config)))
        action, after = program(*arrays, observation, before, key=key, action_mask=action_mask)
        action = jax.tree.map(lambda part: part[0], action) if is_single else action
        return action if carry is None else (action, after)

    def initial_carry(self, num: int = 1, prompt: jax.Array | None = None) -> PyTree:
        """The carry at the start of `num` episodes; a transformer reads the prompts `[num, P]`."""
        return self.config.policy.initial_carry(self.params, num, prompt)

    def state(self, key: jax.Array) -> TrainState:
        """A train state with this policy, for `evaluate` and `make_train_step`: environments and optimiser begin anew.

        Pure: `vmap` it over policies and keys.
        """
        state = make_init(self.config)(key, self.hyperparams, self.env_params, self.params)
        return state.replace(normalizer=self.normalizer)

    def on(self, environment: Any = None, env_params: Mapping[str, float] | None = None) -> "TrainedPolicy":
        """The policy for playing in another environment, or under other parameters of the environment.

        Args:
          environment: as in `Config`; None keeps the run's.
          env_params: parameters to override, such as `{"max_steps_in_episode": 1000}`.

        Raises:
          ConfigError: the other environment has other observations or actions.
        """
        config, given = self.config, dict(env_params or {})
        kept = {} if environment is not None else dict(config.env_params)
        config = dataclasses.replace(
            config,
            environment=config.environment if environment is None else environment,
            env_params=kept | given,
            # A rollout for training of one episode has its length, which may be another now.
            num_steps=config.num_steps if config.algorithm.start.auto_reset else None,
            num_minibatches=1,
            num_microbatches=None,
            shuffle_blocks=1,
        )
        for field in ("observation", "action_space"):
            old, new = getattr(self.config.env, field), getattr(config.env, field)
            if old != new:
                raise ConfigError(
                    f"{config.env.name!r} has the {field} {new}, but the policy was trained with {old}, as in "
                    f"{self.config.env.name!r}; choose an environment with the same"
                )
        rows = {} if environment is not None else self.env_params
        return self.replace(config=config, env_params={name: rows[name] for name in rows if name not in given})


def load(
    folder: str | Path,
    run: str | None = None,
    *,
    which: Literal["final", "best"] = "final",
    row: int | Literal["best", "all"] = "best",
    config: Config | None = None,
    trust: bool = False,
) -> TrainedPolicy:
    """A trained policy from the folder of a run.

    ```python
    policy = grpo_jax.load("runs/mine")
    actions = policy.act(observations)
    ```

    Args:
      folder: of the results, such as `--out` of a command.
      run: its name, such as "PPO on CartPole-v1" or "PPO"; needed if the folder holds several runs. Of a
        sweep, None is the best setting.
      which: "final", the latest, or "best", when the score was highest.
      row: number of the seed, or of the seed × hyperparameters; "best" is the seed with the highest score, where rows
        differ in their settings among those of the setting with the highest mean score; "all" gives all rows, as
        `run(params=...)` takes them.
      config: of the run, where its file cannot express it: with functions that have no import path, such as a
        lambda, or an environment that is an object; or that of a run to start from the policy, with such parameters.
      trust: import what the folder names: environments, networks and other functions that are not of this package.
        Importing runs code, so do this only if you trust who made the folder.

    Raises:
      ConfigError: there is no such folder, run, file or row, a file is damaged or of a newer format, the parameters
        do not fit the config, or the folder names something that is not trusted.
    """
    if which not in ("final", "best"):
        raise ConfigError(f"which={which!r} is unknown; use 'final' or 'best'")
    file = find_run(as_path(folder), run).with_name(f"{which}.npz")
    description, arrays = read_archive(file, KINDS)
    num_rows, missing = description["num_rows"], description["not_in_config"]
    if config is None and missing:
        raise ConfigError(
            f"{file} cannot express {', '.join(missing)}, as it is an object or a function without an import path; "
            "give the run's config: load(folder, config=my_config)"
        )
    fields = {} if config is not None else from_json(file, description["config"], FIELDS, "Config", trust=trust)
    try:
        config = Config(**fields) if config is None else config
        kind = config.hyperparams_class
        state = jax.eval_shape(make_init(config), jax.random.key(0), kind())
    except Exception as error:  # of functions that the file names, too
        raise ConfigError(f"{file}: the policy of the config cannot be made: {error}") from error
    try:
        env_params = {name: as_numbers(value) for name, value in (description["env_params"] or {}).items()}
        env_params = row_parameters(config.env, env_params, num_rows)
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file}: env_params are damaged: {error}") from error
    # A hyperparameter that is newer than the file has its default; one that nothing of the config reads is left out.
    saved = {name: np.float32(0) for name in kind.__dataclass_fields__ if f"hyperparams/{name}" in arrays}
    read = {f"hyperparams/{name}" for name in saved}
    of_others = {"params/critic/": config.policy.has_critic, "normalizer/discounted_return/": config.normalize_rewards}
    others = "hyperparams/", *(path for path, is_own in of_others.items() if not is_own)
    arrays = {path: leaf for path, leaf in arrays.items() if path in read or not path.startswith(others)}
    like = {"params": state.params, "normalizer": state.normalizer, "hyperparams": saved}
    trees = _as_trees(like | {"score": np.float32(0), "steps": np.int64(0)}, arrays, num_rows, file)
    trees["hyperparams"] = kind(**trees["hyperparams"]).broadcast(num_rows)
    rows = np.arange(num_rows)
    policies = TrainedPolicy(as_setting(description).title, config, **trees, env_params=env_params, row=rows)
    if row == "all":
        return policies
    if row == "best":
        row = policies.settings.best_row(arrays["score"])
    if not isinstance(row, int | np.integer) or not 0 <= row < num_rows:
        raise ConfigError(f"row={row!r}, but {file} holds the rows 0 to {num_rows - 1}; use one, 'best' or 'all'")
    return policies[row]


def _as_trees(like: PyTree, arrays: Arrays, num_rows: int, file: Path) -> dict[str, PyTree]:
    """The arrays of a file in a structure, each leaf with an axis of rows; ConfigError with the first that does not."""
    here = {path: [num_rows, *leaf.shape] for path, leaf in by_path(like).items()}
    there = {path: list(array.shape) for path, array in arrays.items()}
    for path in {**here, **there}:
        if here.get(path) != there.get(path):
            raise ConfigError(
                f"{path} is {there.get(path, 'missing')} in {file}, but {here.get(path, 'missing')} by its num_rows "
                "and config: the config has another environment or network, the code has changed, or it is damaged"
            )
    leaves = [arrays[path] if path in ("score", "steps") else jnp.asarray(arrays[path]) for path in here]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _as_observation(config: Config, observation: PyTree) -> tuple[PyTree, bool]:
    """The observation as arrays, and whether it is one; False for a batch."""
    given, what = config.env.codec.given, f"an observation of {config.env.name!r}"
    leaves = exact_leaves(given, observation, what)
    like, structure = jax.tree.flatten(given)
    expected, shapes = [leaf.shape for leaf in like], [leaf.shape for leaf in leaves]
    is_single = shapes == expected
    sizes = {shape[:1] for shape in shapes}
    if not is_single and ([shape[1:] for shape in shapes] != expected or len(sizes) != 1 or sizes & {(), (0,)}):
        raise ConfigError(
            f"{what} has the shape {', '.join(map(str, expected))}, but was given {', '.join(map(str, shapes))}; a "
            "batch of one or more has one more axis, the first"
        )
    return jax.tree.unflatten(structure, map(jnp.asarray, leaves)), is_single


def _as_action_mask(config: Config, action_mask: Any, num: int, is_single: bool) -> jax.Array:
    """The mask as an array `[N, num_actions]`; it may be given as `[num_actions]`, for all observations."""
    mask, num_actions = jnp.asarray(action_mask), getattr(config.env.action_space, "num_actions", None)
    mask = mask != 0 if jnp.issubdtype(mask.dtype, jnp.integer) else mask  # as in an info of gymnasium
    if mask.dtype != bool or mask.shape not in ((num_actions,), (num_actions,) if is_single else (num, num_actions)):
        raise ConfigError(
            f"action_mask is {mask.dtype}{list(mask.shape)}, but actions are in {config.env.action_space}; give a bool "
            f"for each discrete action, True if it is legal{'' if is_single else f', or {num} times as many'}"
        )
    if not isinstance(mask, jax.core.Tracer) and not mask.any(axis=-1).all():
        raise ConfigError("action_mask has no legal action for an observation; True is a legal one")
    return jnp.broadcast_to(mask, (num, num_actions))
