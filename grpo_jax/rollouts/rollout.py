"""Rollouts: one scan over steps, `B` environments wide, that serves every environment and every policy."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.devices.execution_plan import ExecutionPlan, resolve_plan
from grpo_jax.environments import Environment
from grpo_jax.environments.environment import diverged, threefry
from grpo_jax.errors import ConfigError, are_alike, describe_arrays, nearest
from grpo_jax.groups import copy_to_members
from grpo_jax.policies import Policy
from grpo_jax.policies.sampling import apply_sampling_mask
from grpo_jax.rollouts.outcomes import add_outcome
from grpo_jax.rollouts.resets import StartStates, advance_where, make_start_states, new_episodes, select
from grpo_jax.rollouts.scan import any_in_all_rows, block_length, scan_in_blocks
from grpo_jax.rollouts.values import Truncations, cut_at_divergence, with_final_values, with_values
from grpo_jax.types import PyTree, RolloutState, Trajectory


class LoopCarry(NamedTuple):
    """The carry of a rollout's loop over its steps."""

    state: RolloutState
    num_done: jax.Array  # [B] int32: the steps that ended an episode, or came after its end where no other follows
    truncations: Truncations | None  # None where no episode follows another, or no value of their ends is needed
    ahead: PyTree  # start states of later episodes: see `StartStates`


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
    keep_final: bool = False  # trajectories keep the final observations, for a baseline to value

    def reset(self, environment_params: PyTree, key: jax.Array, num_envs: int, *, group_size: int = 1) -> RolloutState:
        """New episodes: one reset for each group, copied to its members, which therefore start bitwise equal.

        Args:
          environment_params: each leaf `[num_envs, ...]`; a reset and a prompt see those of a group's first member.
          key: of all resets.
          num_envs: number of environments.
          group_size: number of environments that start from each reset.
        """
        num_groups = num_envs // group_size
        keys = jax.random.split(threefry(key), num_groups)
        of_groups = jax.tree.map(lambda leaf: leaf[::group_size], environment_params)
        start, observation = jax.vmap(self.environment.reset)(keys, of_groups)
        prompt = None
        if self.environment.prompt is not None:
            prompt = jax.vmap(self.environment.prompt)(start, of_groups)
        # The prompt is read once for all members of its group.
        carry = self.policy.initial_carry(self.params, num_groups, prompt)
        members = copy_to_members(new_episodes(start, observation, carry), group_size)
        return members._replace(environment_params=environment_params)

    def unroll(
        self,
        state: RolloutState,
        key: jax.Array,
        *,
        num_steps: int,
        auto_reset: bool,
        from_reset: bool = False,
        greedy: bool | jax.Array = False,
    ) -> tuple[RolloutState, Trajectory]:
        """Acts for `num_steps` in every environment and records what happens.

        Without `auto_reset` an environment whose episode ends stays in its final state: later steps are not `valid`,
        have reward 0 and change nothing but the policy's carry, which is not read again. If the environment has an
        `outcome`, it is added to the rewards: see `add_outcome`.

        Where an environment diverges (`can_diverge`), the step is discarded: the episode is truncated at the last
        finite state, whose value bootstraps it. With `auto_reset` a new episode follows, which this rollout plays but
        does not show: all steps after the first divergence are not `valid`, so that one more final observation for
        each environment is enough.

        Where the environment itself acts (`forced_action`), its action replaces the policy's, also a greedy one.
        `log_prob` is then the policy's for that action, without any mask.

        Args:
          state: the state of `B` environments.
          key: of all randomness in this rollout.
          num_steps: `T`.
          auto_reset: whether another episode follows the end of one, from a start state of its own.
          from_reset: whether `state` is one of `reset`: by step `t` a transformer has filled `t` places of its cache,
            and attends to little more, in stages of static length; results are the same up to rounding.
          greedy: take the distribution's mode instead of a sample, in all environments, or where true in `[B]`.

        Returns:
          The state after the last step, and the trajectory `[T, B]`.
        """
        plan, num_envs = resolve_plan(self.plan), state.num_envs
        self = self._replace(params=self.policy.cast(self.params), plan=plan)
        num_blocks = num_steps // block_length(num_steps)
        keys = jax.random.split(key, 1 + 2 * num_blocks)
        key_reset, keys_of_blocks = keys[0], keys[1:].reshape(num_blocks, 2, *key.shape)

        # What the loop carries; the parameters of the environments stay as they are, so it need not carry them.
        start, environment_params = state._replace(environment_params=None), state.environment_params
        start_states = self._start_states(state, key_reset, num_steps) if auto_reset else None

        def steps(carry, xs):
            take_start = start_states and start_states.before_steps(carry.num_done, len(xs[1]))
            step = functools.partial(self._step, take_start, environment_params, greedy)
            return jax.lax.scan(step, carry, xs, unroll=True)

        carry = LoopCarry(
            start,
            num_done=jnp.zeros(num_envs, jnp.int32),
            truncations=self._no_truncations(start, num_steps) if auto_reset else None,
            ahead=start_states and start_states.ahead,
        )

        # The loop over steps, with random numbers for a block at a time.
        draw = functools.partial(self._random_numbers, num_envs=num_envs)
        has_stages = from_reset and not auto_reset and self.policy.resize is not None
        stops = not auto_reset and 0 < plan.steps_per_check < num_steps
        # Where values are read, an episode has one more step after its end: its value is the final observation's.
        num_after = int(self.policy.has_critic or self.keep_final)
        carry, trajectory = scan_in_blocks(
            *(steps, carry, keys_of_blocks, num_steps, draw, plan),
            goes_on=(lambda carry: any_in_all_rows(carry.num_done <= num_after)) if stops else None,
            resize=self._resize if has_stages else None,
        )

        # What is known only at the end: values of final observations, outcomes.
        if greedy is not False:
            trajectory = trajectory._replace(greedy=jnp.broadcast_to(greedy, (num_steps, num_envs)))
        return self._complete(state, carry, trajectory, auto_reset)

    def play(
        self,
        environment_params: PyTree,
        key: jax.Array,
        num_envs: int,
        *,
        group_size: int = 1,
        greedy: bool | jax.Array = False,
    ) -> tuple[RolloutState, Trajectory]:
        """Whole episodes, from `reset` to their ends."""
        key_reset, key_steps = jax.random.split(key)
        start = self.reset(environment_params, key_reset, num_envs, group_size=group_size)
        whole = {"num_steps": self.environment.max_steps, "auto_reset": False, "from_reset": True}
        return self.unroll(start, key_steps, **whole, greedy=greedy)

    @property
    def _num_passes(self) -> int:
        """Passes over a rollout that compute values and log-probabilities; 0: each step computes its own."""
        # A carry advances with the values, and support depends on the distribution: then every step computes all.
        has_passes = not self.policy.has_carry and self.policy.sampling_mask is None
        return self.plan.value_passes if has_passes else 0

    def _start_states(self, state: RolloutState, key: jax.Array, num_steps: int) -> StartStates:
        """The start states of a rollout of `num_steps`."""
        num_draws = min(self.plan.num_reset_draws, num_steps)
        num_starts = self.starts_per_rollout and min(self.starts_per_rollout, num_steps)
        return make_start_states(self.environment, state, threefry(key), num_draws, num_starts)

    def _random_numbers(self, keys: jax.Array, num_steps: int, num_envs: int) -> tuple[PyTree, jax.Array]:
        """The noise of actions, each leaf `[T, B, ...]`, and the keys of environments, `[T, B]`, of two `keys`."""
        shape = num_steps, num_envs
        key_actions, key_environment = keys
        noise = self.policy.distribution.noise(key_actions, shape)
        for leaf in jax.tree.leaves(noise):
            if jnp.shape(leaf)[:2] != shape:  # some steps or environments would share their noise unnoticed
                raise ValueError(
                    f"the distribution's noise(key, {shape}) returned shape {jnp.shape(leaf)}, and each array should "
                    f"begin with {shape}; noise=jax.random.split gives a key for each sample"
                )
        return noise, jax.random.split(threefry(key_environment), shape)

    def _step(
        self,
        take_start: Callable | None,
        environment_params: PyTree,
        greedy: bool | jax.Array,
        carry: LoopCarry,
        xs: tuple[PyTree, jax.Array],
    ) -> tuple[LoopCarry, Trajectory]:
        """One step of the loop: the next carry and the record, each leaf `[B, ...]`.

        Args:
          take_start: of `StartStates.before_steps`; None: no episode follows another.
          environment_params, greedy: as of `unroll`.
          carry: before the step.
          xs: the noise of the actions, and the keys of the environments.
        """
        state, (noise, keys) = carry.state, xs
        alive = jnp.ones(state.num_envs, bool) if take_start else carry.num_done == 0
        next_state, record = self._transition(state, environment_params, alive, noise, keys, greedy)
        ended, cut, ahead = record.ended, record.truncated, carry.ahead
        if record.diverged is not None:
            next_state = select(record.diverged, state, next_state)
            ended, cut = ended | record.diverged, cut | record.diverged
        truncations = carry.truncations and carry.truncations.add(cut, next_state)
        if take_start and self.environment.truncates_early and self.policy.has_critic:
            next_value = self.policy.step(self.params, next_state.observation, next_state.policy_carry)[1]
            record = record._replace(next_value=next_value)
        if self._num_passes:
            record = record._replace(log_prob=None, value=None)
        if take_start:
            ahead, start = take_start(ahead, ended, carry.num_done)
            policy_carry = self.policy.initial_carry(self.params, state.num_envs)
            next_state = select(ended, new_episodes(*start, policy_carry), next_state)
            record = record._replace(valid=None)  # all are
        else:
            next_state = advance_where(alive, state, next_state)
        return LoopCarry(next_state, carry.num_done + (ended | ~alive).astype(jnp.int32), truncations, ahead), record

    def _transition(
        self,
        state: RolloutState,
        environment_params: PyTree,
        alive: jax.Array,
        noise: PyTree,
        keys: jax.Array,
        greedy: bool | jax.Array,
    ) -> tuple[RolloutState, Trajectory]:
        """The next state, before any reset, and the record of the step, each leaf `[B, ...]`."""
        environment, family = self.environment, self.policy.distribution

        # The policy chooses, among legal actions, unless the environment acts itself.
        distribution, value, policy_carry = self.policy.step(self.params, state.observation, state.policy_carry)
        action_mask = forced_action = forced = None
        if environment.action_mask is not None:
            action_mask = jax.vmap(environment.action_mask)(state.environment, environment_params)
        if environment.forced_action is not None:
            forced_action = jax.vmap(functools.partial(_forced_action, environment))(
                state.environment, environment_params
            )
            forced = forced_action >= 0
        distribution, action_mask = apply_sampling_mask(self.policy, distribution, action_mask, forced)
        action = family.from_noise(distribution, noise)
        if greedy is not False:  # else the compiler would compute the modes all the same
            action = select(jnp.broadcast_to(greedy, action.shape[:1]), family.mode(distribution), action)
        if forced is not None:
            action = jnp.where(forced, forced_action, action)

        # The environment moves; a step to NaN or inf does not count.
        transition = jax.vmap(environment.step)(
            keys, state.environment, family.to_environment(action), environment_params
        )
        if self.plan.steps_per_loop > 1:  # or XLA computes a step again wherever its results are read
            rest = {"observation": transition.observation, "info": transition.info}
            action, transition = jax.lax.optimization_barrier((action, transition._replace(observation=None, info={})))
            transition = transition._replace(**rest)
        is_diverged = None
        if environment.can_diverge:
            is_diverged = alive & jax.vmap(diverged)(state.environment, transition)
            alive &= ~is_diverged
        reward = jnp.where(alive, transition.reward, 0.0)
        next_state = state._replace(
            environment=transition.state,
            observation=transition.observation,
            policy_carry=policy_carry,
            episode_return=state.episode_return + reward,
            episode_length=state.episode_length + alive.astype(jnp.int32),
            discounted_return=reward + self.discount * state.discounted_return,
        )

        # The record of the step.
        in_chunks = self.policy.logits_chunk is not None
        if in_chunks and action_mask is not None:
            action_mask = jnp.packbits(action_mask, axis=-1)
        return next_state, Trajectory(
            observation=state.observation,
            action=action,
            reward=reward,
            terminated=transition.terminated & alive,
            truncated=transition.truncated & alive,
            valid=alive,
            log_prob=family.log_prob(distribution, action),
            distribution=None if in_chunks else distribution,
            value=value,
            next_value=None,  # known after the rollout, or in `_step`
            episode_return=next_state.episode_return,
            episode_length=next_state.episode_length,
            discounted_return=next_state.discounted_return,
            carry=None,  # only of the first step
            action_mask=action_mask,
            reward_parts=transition.reward_parts,
            forced=forced,
            diverged=is_diverged,
            extras=self._extras(transition.info),
        )

    def _no_truncations(self, state: RolloutState, num_steps: int) -> Truncations | None:
        """Slots for all episodes that can be truncated in `num_steps`; None where nothing reads them."""
        if not (self.policy.has_critic or self.keep_final):
            return None
        if self.environment.truncates_early:
            if self.keep_final:
                raise ConfigError(
                    f"{self.environment.name!r} may truncate an episode before max_steps_in_episode, but the baseline "
                    "of this algorithm keeps a place for the ends at that limit alone; terminate there instead, or use "
                    "an algorithm with a critic, such as ppo, or with one-episode groups, such as grpo"
                )
            return None
        num_slots = -(-num_steps // self.environment.max_steps) + self.environment.can_diverge
        return Truncations.none(num_slots, state)

    def _resize(self, carry: LoopCarry, num_steps: int) -> LoopCarry:
        """The carry of the loop, with space in the policy's carry for `num_steps` of each episode."""
        num_steps += self.policy.has_critic  # which also reads the final observation, for its value
        policy_carry = self.policy.resize(carry.state.policy_carry, num_steps)
        return carry._replace(state=carry.state._replace(policy_carry=policy_carry))

    def _complete(
        self, state: RolloutState, carry: LoopCarry, trajectory: Trajectory, auto_reset: bool
    ) -> tuple[RolloutState, Trajectory]:
        """The state after a rollout, and its trajectory with all that is known only at the end.

        Args:
          state: before the first step.
          carry: after the last step.
          trajectory: the records of the steps, `[T, B]`.
          auto_reset: as of `unroll`.
        """
        shape = trajectory.reward.shape
        if auto_reset:
            trajectory = trajectory._replace(valid=jnp.ones(shape, bool))
        if trajectory.diverged is not None:
            trajectory = cut_at_divergence(trajectory)
        if self._num_passes:
            trajectory = with_values(self.policy, self.params, trajectory, state.policy_carry, self._num_passes)
        policy_carry = self.policy.sequence_carry(state.policy_carry)
        trajectory = trajectory._replace(carry=jax.tree.map(lambda leaf: leaf[None], policy_carry))
        trajectory = with_final_values(
            self.policy, self.params, trajectory, carry.truncations, carry.state, self.keep_final
        )
        end = carry.state._replace(environment_params=state.environment_params)
        return add_outcome(self.environment, self.discount, auto_reset, end, trajectory)

    def _extras(self, info: Mapping[str, jax.Array]) -> dict[str, jax.Array] | None:
        """What is kept of the environments' info after a step; each `[B, ...]`."""
        environment = self.environment
        for name in environment.extras:
            if name not in info:
                raise ConfigError(f"extras: the info of {environment.name!r} has no {name!r}: {nearest(name, info)}")
        return {name: info[name] for name in environment.extras} or None


def _forced_action(environment: Environment, state: PyTree, params: PyTree) -> jax.Array:
    """The environment's own action; raises ConfigError unless it is an int32 scalar."""
    action = environment.forced_action(state, params)
    if not are_alike(action, jax.ShapeDtypeStruct((), jnp.int32)):
        raise ConfigError(
            f"forced_action of {environment.name!r} gives {describe_arrays(action)}; return an int32 scalar, the "
            "environment's own action, or -1 where the policy acts"
        )
    return action
