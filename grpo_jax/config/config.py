"""The static half of a run: what changes a shape or a branch. Frozen, hashable, checked at construction."""

import dataclasses
import functools

from grpo_jax.algorithms import Algorithm, by_name
from grpo_jax.config.automatic import automatic_algorithm
from grpo_jax.config.checks import check_algorithm, check_counts, check_groups, check_numbers
from grpo_jax.config.dry_run import check_slots
from grpo_jax.config.environment_checks import check_environment
from grpo_jax.config.fields import Fields
from grpo_jax.config.optimizer_checks import check_optimizer
from grpo_jax.config.policy_checks import check_policy
from grpo_jax.environments.parameters import static_parameters


@dataclasses.dataclass(frozen=True)
class Config(Fields):
    """What a run is: environment, algorithm, rollout, update and policy. Floats that are traced are in `Hyperparams`.

    `group_size` and `num_steps` may be left out (None): they are then chosen to suit the algorithm and the environment.
    `dataclasses.replace` keeps the chosen integers; pass None to have them chosen again.

    Raises:
      ConfigError: at construction, for anything that could not run, with what to write instead.
    """

    def __post_init__(self):
        """Resolves what was left out and checks the whole."""
        resolve = functools.partial(object.__setattr__, self)
        check_counts(self)
        resolve("env_params", static_parameters(self.env_params))
        if not isinstance(self.algorithm, Algorithm):
            name = str(self.algorithm)
            resolve("algorithm", by_name(automatic_algorithm(self.env.max_steps).name if name == "auto" else name))
        if self.group_size is None:
            divisors = [size for size in range(1, 17) if self.num_envs % size == 0]
            resolve("group_size", divisors[-1] if self.algorithm.start.grouped else 1)
        if self.num_steps is None:
            resolve("num_steps", 128 if self.algorithm.start.auto_reset else self.env.max_steps)
        if self.share_prompts is None:
            in_groups = self.num_training_groups % self.num_minibatches == 0 and self.group_size > 1
            resolve("share_prompts", self.is_transformer and self.algorithm.start.from_reset and in_groups)
        check_environment(self)
        check_policy(self)
        check_numbers(self)
        check_groups(self)
        check_algorithm(self)
        check_slots(self)
        check_optimizer(self)
