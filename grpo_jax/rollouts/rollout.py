"""Rollouts: one scan over steps, `B` environments wide, that serves every environment and every policy."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.devices.execution_plan import ExecutionPlan, resolve_plan
from grpo_jax.environments import Environment
from grpo_jax.environments.environment import threefry
from grpo_jax.errors import ConfigError, are_alike, describe_arrays, nearest
from grpo_jax.groups import copy_to_members
from grpo_jax.policies import Policy
from grpo_jax.policies.sampling import apply_sampling_mask
from grpo_jax.rollouts.finals import Truncations, num_finals
from grpo_jax.rollouts.outcomes import add_outcome
from grpo_jax.rollouts.packing import pack, packed_step
from grpo_jax.rollouts.randomness import scan_in_blocks, shared_keys, step_randomness
from grpo_jax.rollouts.resets import advance_where, make_start_states, new_episodes, select
from grpo_jax.rollouts.stopping import any_in_all_rows, scan_until_over
from grpo_jax.rollouts.values import with_final_values, with_values
from grpo_jax.types import PyTree, RolloutState, Trajectory


class Progress(NamedTuple):
    """The carry of a rollout's loop, each leaf `[B, ...]`."""

    state: RolloutState
    truncations: Truncations
    alive: jax.Array | None = None  # bool: the episode goes on; None where another follows
    num_ended: jax.Array | None = None  # int32, episodes that have ended; None where no other follows


class Simulator(NamedTuple):
    """A policy, with its parameters, in an environment.

        simulator = Simulator(config.env, config.policy, params)
        state = simulator.reset(environment_params, key_reset, num_envs=8)
        state, trajectory = simulator.unroll(state, key_rollout, num_steps=128, auto_reset=True)

    Training, evaluation, generation and imitation all use it.
    """

    environment: Environment
    policy: Policy
    params: PyTree  # of the policy
    discount: jax.Array | float = 1.0  # of `discounted_return`
    plan: str | ExecutionPlan = "auto"  # how the rollout is laid out: see `ExecutionPlan`
    starts_per_rollout: int | None = None  # start states drawn for each environment; None: one for every episode

    def reset(self, environment_params: PyTree, key: jax.Array, num_envs: int, *, group_size: int = 1) -> RolloutState:
        """New episodes: one reset for each group, copied to its members, which therefore start bitwise equal.

        Args:
          environment_params: each leaf `[num_envs, ...]`, equal within a group (see `group_parameters`).
          key: of all resets.
          num_envs: number of environments.
          group_size: number of environments that start from each reset.
        """
        num_groups = num_envs // group_size
        keys = jax.random.split(threefry(key), num_groups)
        environment_params = jax.tree.map(lambda leaf: leaf[::group_size], environment_params)
        start, observation = jax.vmap(self.environment.reset)(keys, environment_params)
        prompt = None
        if self.environment.prompt is not None:
            prompt = jax.vmap(self.environment.prompt)(start, environment_params)
        # The prompt is read once for all members of its group.
        carry = self.policy.initial_carry(self.params, num_groups, prompt)
        return copy_to_members(new_episodes(start, observation, carry, environment_params), group_size)

    def unroll(
        self,
        state: RolloutState,
        key: jax.Array,
        *,
        num_steps: int,
        auto_reset: bool,
        from_reset: bool = False,
        greedy: bool | jax.Array = False,
        first_action: jax.Array | None = None,
        num_sharing: int = 1,
        keep_final: bool = False,
        keep_states: bool = False,
    ) -> tuple[RolloutState, Trajectory]:
        """Acts for `num_steps` in every environment and records what happens.

        With `auto_reset` an environment whose episode ends starts another. Start states have the environment's own
        distribution and are independent of each other, but `starts_per_rollout` repeats those of an environment.
        Truncation is exact: `next_value` is the critic's value of the true next observation, which may be a final one.

        Without `auto_reset` an environment whose episode ends stays in its final state: later steps are not `valid`,
        have reward 0 and change nothing but the policy's carry, which is not read again. If the environment has an
        `outcome`, it is evaluated on the final states and added to the rewards of the steps: see `add_outcome`.

        Where the environment itself acts (`imposed`), its action replaces the policy's, also a greedy one or
        `first_action`. `log_prob` is then the policy's for that action, without any mask.

        Args:
          state: the state of `B` environments.
          key: of all randomness in this rollout.
          num_steps: `T`.
          auto_reset: whether another episode follows the end of one.
          from_reset: whether `state` is one of `reset`, so that step `t` of the rollout is step `t` of each episode. A
            transformer then attends to the part of its cache that can be filled by `t`, in stages of static length;
            results are the same up to rounding.
          greedy: take the distribution's mode instead of a sample, in all environments, or where true in `[B]`.
          first_action: `[B]` or `[B, D]`, taken at the first step instead of the policy's own.
          num_sharing: number of neighbouring environments that share all randomness but that of their actions (common
            random numbers); 1: none do.
          keep_final: whether the trajectory keeps the final observations, for a baseline to value.
          keep_states: whether the trajectory keeps the state before each step, without the environments' parameters.

        Returns:
          The state after the last step, and the trajectory `[T, B]`.
        """
        plan, policy, num_envs = resolve_plan(self.plan), self.policy, state.num_envs
        self = self._replace(params=policy.cast(self.params))
        # A carry advances with the values, and a sampling mask depends on the distribution: every step computes all.
        num_passes = 0 if policy.has_carry or policy.sampling_mask is not None else plan.value_passes
        key_reset, key_steps = jax.random.split(key)
        # The parameters stay as they are, so the scan need not carry them.
        environment_params, start = state.environment_params, state._replace(environment_params=None)
        if auto_reset:
            reset_keys = shared_keys(key_reset, num_envs, num_sharing)
            num_draws = min(plan.num_reset_draws, num_steps)
            num_starts = self.starts_per_rollout and min(self.starts_per_rollout, num_steps)
            start_states = make_start_states(self.environment, environment_params, reset_keys, num_draws, num_starts)

        def step(progress, now):
            before, truncations = progress.state, progress.truncations
            alive = jnp.ones(num_envs, bool) if auto_reset else progress.alive
            (noise, keys), is_first = now
            keys = jnp.repeat(keys, num_sharing, axis=0)

            def choose(distribution):
                action = policy.distribution.from_noise(distribution, noise)
                if greedy is not False:  # else the compiler would compute the modes all the same
                    mode = policy.distribution.mode(distribution)
                    action = select(jnp.broadcast_to(greedy, alive.shape), mode, action)
                return action if first_action is None else jnp.where(is_first, first_action, action)

            after, record = self._step(before, environment_params, alive, keys, choose)
            ended = record.ended
            truncations = truncations.add(record.truncated, after)
            if num_passes:
                record = record._replace(log_prob=None, value=None)
            if keep_states:
                record = record._replace(state=before)
            if auto_reset:
                starts = start_states(ended, progress.num_ended)
                after = select(ended, new_episodes(*starts, policy.initial_carry(self.params, num_envs)), after)
                return Progress(after, truncations, num_ended=progress.num_ended + ended), record._replace(valid=None)
            return Progress(advance_where(alive, before, after), truncations, alive=alive & ~ended), record

        progress = self._first_progress(start, num_steps, auto_reset, keep_final)
        if plan.packed_steps:
            step, progress = packed_step(step), pack(progress)

        def resize(progress, num_steps):
            num_steps += policy.has_critic  # which also reads the final observation, for its value
            if plan.packed_steps:
                return pack(_resized(policy, progress.unpack(), num_steps))
            return _resized(policy, progress, num_steps)

        draw = functools.partial(step_randomness, policy.distribution, num_envs=num_envs, num_sharing=num_sharing)
        # The states that `keep_states` stacks must have one shape.
        has_stages = from_reset and not auto_reset and policy.resize is not None and not keep_states
        layout = {"steps_per_loop": plan.steps_per_loop, "resize": resize if has_stages else None}
        scan = functools.partial(scan_in_blocks, **layout)
        if not auto_reset and 0 < plan.steps_per_check < num_steps:
            # An episode may have one more step after its end: its value is that of the final observation.
            scan = functools.partial(
                scan_until_over,
                goes_on=lambda record: any_in_all_rows((record.unpack() if plan.packed_steps else record).valid[-1]),
                steps_per_check=plan.steps_per_check,
                **layout,
            )
        progress, trajectory = scan(step, progress, key_steps, num_steps, draw)
        if plan.packed_steps:
            progress, trajectory = progress.unpack(), trajectory.unpack()

        is_first, shape = jnp.arange(num_steps)[:, None] == 0, (num_steps, num_envs)
        trajectory = trajectory._replace(
            greedy=None if greedy is False else jnp.broadcast_to(greedy, shape),
            given=None if first_action is None else jnp.broadcast_to(is_first, shape),
        )
        if num_passes:
            trajectory = with_values(policy, self.params, trajectory, start.policy_carry, num_passes)
        return self._complete(state, progress, trajectory, auto_reset, keep_final)

    def _first_progress(self, start: RolloutState, num_steps: int, auto_reset: bool, keep_final: bool) -> Progress:
        """The progress before the first of `num_steps` steps."""
        values_finals = self.policy.has_critic or keep_final
        num_slots = num_finals(self.environment, num_steps, auto_reset) - 1 if values_finals else 0
        progress = Progress(start, Truncations.none(num_slots, start))
        if auto_reset:
            return progress._replace(num_ended=jnp.zeros(start.num_envs, jnp.int32))
        return progress._replace(alive=jnp.ones(start.num_envs, bool))

    def _complete(
        self, before: RolloutState, progress: Progress, trajectory: Trajectory, auto_reset: bool, keep_final: bool
    ) -> tuple[RolloutState, Trajectory]:
        """The state after a rollout, and its trajectory with all that is known only at the end.

        Args:
          before: the state before the first step.
          progress: after the last step.
          trajectory: the records of the steps, `[T, B]`.
          auto_reset, keep_final: as of `unroll`.
        """
        trajectory = trajectory._replace(
            valid=jnp.ones(trajectory.reward.shape, bool) if auto_reset else trajectory.valid,
            carry=jax.tree.map(lambda leaf: leaf[None], self.policy.sequence_carry(before.policy_carry)),
        )
        finals = progress.truncations.and_last(progress.state)
        trajectory = with_final_values(self.policy, self.params, trajectory, *finals, keep=keep_final)
        end = progress.state._replace(environment_params=before.environment_params)
        return add_outcome(self.environment, self.discount, auto_reset, end, trajectory)

    def _step(
        self,
        state: RolloutState,
        environment_params: PyTree,
        alive: jax.Array,
        keys: jax.Array,
        choose: Callable[[jax.Array], jax.Array],
    ) -> tuple[RolloutState, Trajectory]:
        """One step of every environment: the next state, before any reset, and the record, each leaf `[B, ...]`."""
        environment, family = self.environment, self.policy.distribution
        distribution, value, policy_carry = self.policy.step(self.params, state.observation, state.policy_carry)
        action_mask = None
        if environment.action_mask is not None:
            action_mask = jax.vmap(environment.action_mask)(state.environment, environment_params)
        own_action = imposed = None
        if environment.imposed is not None:
            own_action = jax.vmap(functools.partial(_imposed, environment))(state.environment, environment_params)
            imposed = own_action >= 0
        distribution, action_mask = apply_sampling_mask(self.policy, distribution, action_mask, imposed)
        action = choose(distribution)
        if imposed is not None:
            action = jnp.where(imposed, own_action, action)
        moved = jax.vmap(environment.step)(keys, state.environment, family.to_environment(action), environment_params)
        reward = jnp.where(alive, moved.reward, 0.0)
        after = state._replace(
            environment=moved.state,
            observation=moved.observation,
            policy_carry=policy_carry,
            episode_return=state.episode_return + reward,
            episode_length=state.episode_length + alive,
            discounted_return=reward + self.discount * state.discounted_return,
        )
        return after, Trajectory(
            observation=state.observation,
            action=action,
            reward=reward,
            terminated=moved.terminated & alive,
            truncated=moved.truncated & alive,
            valid=alive,
            log_prob=family.log_prob(distribution, action),
            distribution=distribution if self.policy.logits_chunk is None else None,
            value=value,
            next_value=None,  # known after the rollout
            episode_return=after.episode_return,
            episode_length=after.episode_length,
            discounted_return=after.discounted_return,
            carry=None,  # only of the first step
            action_mask=action_mask,
            reward_parts=moved.reward_parts,
            imposed=imposed,
            extras=self._extras(state, moved.info),
        )

    def _extras(self, state: RolloutState, info: Mapping[str, jax.Array]) -> dict[str, jax.Array] | None:
        """What is kept of the environments' info after a step, and of the policy before it; each `[B, ...]`."""
        environment, kept = self.environment, {}
        for name in environment.extras:
            if name not in info:
                raise ConfigError(f"extras: the info of {environment.name!r} has no {name!r}: {nearest(name, info)}")
            kept[name] = info[name]
        if self.policy.extras is not None:
            kept |= self.policy.extras(self.params, state.observation, state.policy_carry)
        return kept or None


def _imposed(environment: Environment, state: PyTree, params: PyTree) -> jax.Array:
    """The environment's own action; raises ConfigError unless it is an int32 scalar."""
    action = environment.imposed(state, params)
    if not are_alike(action, jax.ShapeDtypeStruct((), jnp.int32)):
        raise ConfigError(
            f"imposed of {environment.name!r} gives {describe_arrays(action)}; return an int32 scalar, the "
            "environment's own action, or -1 where the policy acts"
        )
    return action


def _resized(policy: Policy, progress: Progress, num_steps: int) -> Progress:
    """The carry of the loop, with space in the policy's carry for `num_steps` of each episode."""
    state = progress.state._replace(policy_carry=policy.resize(progress.state.policy_carry, num_steps))
    # A rollout of one episode has no slots, but their empty arrays have the shape of the carry.
    truncations = Truncations.none(0, state)._replace(count=progress.truncations.count)
    return progress._replace(state=state, truncations=truncations)
