"""GRPO in one file: gymnax plays, flax acts, optax learns, and the loss is written out.

    python examples/grpo_single_file.py

trains four seeds on CartPole-v1 in one compiled program. There is no critic: GRPO plays the same start several times
and compares the returns. Read it from top to bottom, then copy it and change it. `grpo_jax.run` does the same for any
environment, network and algorithm.

Shapes: B = NUM_GROUPS * GROUP_SIZE episodes of at most T steps are `[T, B]`; a minibatch of N steps is `[N]`.
GRPO: https://arxiv.org/abs/2402.03300. With a language model an episode is a completion, and its start is the prompt.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

from grpo_jax.objectives import group_normalized, mean_over_steps

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
NUM_SEEDS = 4
NUM_ITERATIONS = 20

NUM_GROUPS = 8  # starts
GROUP_SIZE = 16  # episodes from each start
NUM_EPOCHS = 4  # passes over the episodes
NUM_MINIBATCHES = 16  # gradient steps in each pass

LEARNING_RATE = optax.linear_schedule(2e-3, 0.0, NUM_ITERATIONS * NUM_EPOCHS * NUM_MINIBATCHES)
MAX_GRAD_NORM = 0.5
CLIP_LOW, CLIP_HIGH = 0.2, 0.2  # the probability ratio gets no gradient beyond 1 - CLIP_LOW and 1 + CLIP_HIGH
KL_COEF = 0.001  # pulls towards the reference policy, here the initial one


# --- The policy ------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Two hidden layers. The output begins close to 0: a uniform policy."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., features]` to `[..., num_outputs]`."""
        for _ in range(2):
            x = nn.tanh(nn.Dense(64)(x))
        return nn.Dense(self.num_outputs, kernel_init=nn.initializers.normal(1e-3))(x)


ACTOR = MLP(ENV.num_actions)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(LEARNING_RATE, eps=1e-5))


def log_probs_of(params: Any, observation: jax.Array) -> jax.Array:
    """`[..., num_actions]`: the log-probability of each action."""
    return jax.nn.log_softmax(ACTOR.apply({"params": params["actor"]}, observation))


def chosen(log_probs: jax.Array, action: jax.Array) -> jax.Array:
    """`[..., num_actions]` to `[...]`: the entries of the actions that were taken."""
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


# --- The state -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """All that an iteration hands to the next one. It has arrays only, so it can be vmapped, scanned and saved."""

    params: Any
    reference_params: Any  # of the policy that the KL penalty pulls towards
    opt_state: Any
    key: jax.Array


def init(key: jax.Array) -> State:
    """The state before the first iteration."""
    key, key_params, key_reset = jax.random.split(key, 3)
    observation, _ = ENV.reset(key_reset, ENV_PARAMS)
    params = {"actor": ACTOR.init(key_params, observation)["params"]}
    return State(params, params, OPTIMIZER.init(params), key)


# --- 1. Play ---------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """What happened, each leaf `[T, B, ...]`."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array  # of the action, under the parameters that chose it
    reward: jax.Array  # 0 where not valid
    valid: jax.Array  # false after the end of the episode


def play(params: Any, key_reset: jax.Array, key_actions: jax.Array, key_env: jax.Array) -> Rollout:
    """One whole episode in each environment, GROUP_SIZE of them from each of NUM_GROUPS starts."""
    num_steps, num_envs = ENV_PARAMS.max_steps_in_episode, NUM_GROUPS * GROUP_SIZE
    starts = jax.vmap(ENV.reset, (0, None))(jax.random.split(key_reset, NUM_GROUPS), ENV_PARAMS)
    # Environment b = g * GROUP_SIZE + i is member i of group g. A group differs in its actions only.
    observation, env_state = jax.tree.map(lambda leaf: jnp.repeat(leaf, GROUP_SIZE, axis=0), starts)
    # All random numbers of the actions at once: argmax(logits + Gumbel noise) is a sample of the softmax of the logits.
    noise = jax.random.gumbel(key_actions, (num_steps, num_envs, ENV.num_actions))
    env_keys = jax.random.split(key_env, (num_steps, num_envs))

    def step(carry, xs):
        (observation, env_state, valid), (noise, keys) = carry, xs
        log_probs = log_probs_of(params, observation)
        action = jnp.argmax(log_probs + noise, axis=-1)
        env_step = jax.vmap(ENV.step_env, (0, 0, 0, None))  # which does not reset
        next_observation, next_state, reward, terminated, _ = env_step(keys, env_state, action, ENV_PARAMS)
        record = Rollout(observation, action, chosen(log_probs, action), reward * valid, valid)
        return (next_observation, next_state, valid & ~terminated), record

    start = observation, env_state, jnp.ones(num_envs, bool)
    return jax.lax.scan(step, start, (noise, env_keys))[1]


# --- 2. Compare ------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What the updates need of each step, each leaf `[T * B, ...]`; it stays the same during the epochs."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    reference_log_prob: jax.Array
    advantage: jax.Array  # of the step's whole episode: how much better its return was than its group's
    valid: jax.Array
    weight: jax.Array  # in the loss: the same for every valid step


def compare(reference_params: Any, rollout: Rollout) -> Batch:
    """Advantages within groups: A = (return - mean of the group) / standard deviation of the group."""
    returns = jnp.sum(rollout.reward, axis=0).reshape(NUM_GROUPS, GROUP_SIZE)
    advantage = group_normalized(returns).reshape(-1)
    batch = Batch(
        rollout.observation,
        rollout.action,
        rollout.log_prob,
        chosen(log_probs_of(reference_params, rollout.observation), rollout.action),
        jnp.broadcast_to(advantage, rollout.valid.shape),
        rollout.valid,
        # Dr. GRPO's is sum_over_horizon; that of the paper, for which all episodes count the same, is
        # mean_of_sequence_means. They need the shape [T, B], so weights are chosen here and not in each minibatch.
        mean_over_steps(rollout.valid),
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)


# --- 3. Learn --------------------------------------------------------------------------------------------------------


def loss(params: Any, batch: Batch) -> tuple[jax.Array, dict]:
    """GRPO's loss of a minibatch, written out, and its metrics. It equals `grpo_jax.objectives.grpo_loss`."""
    log_prob = chosen(log_probs_of(params, batch.observation), batch.action)
    log_prob = jnp.where(batch.valid, log_prob, batch.log_prob)  # what follows the end of an episode is a constant
    ratio = jnp.exp(log_prob - batch.log_prob)  # 1 before the first update
    clipped = jnp.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    surrogate = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
    away = batch.reference_log_prob - log_prob
    kl = jnp.exp(away) - 1 - away  # an estimate of KL(policy || reference) that is never negative
    weight = NUM_MINIBATCHES * batch.weight  # so that the minibatches' mean is the loss of all
    metrics = {"policy/clip_fraction": jnp.mean(surrogate < ratio * batch.advantage, where=batch.valid)}
    return -jnp.sum(weight * (surrogate - KL_COEF * kl)), metrics


def minibatch_order(key: jax.Array, num_samples: int) -> jax.Array:
    """`[NUM_EPOCHS * NUM_MINIBATCHES, N]`: the samples of each gradient step, shuffled anew in each epoch."""
    shuffle = jax.vmap(lambda key: jax.random.permutation(key, num_samples))
    return shuffle(jax.random.split(key, NUM_EPOCHS)).reshape(NUM_EPOCHS * NUM_MINIBATCHES, -1)


def learn(params: Any, opt_state: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any, dict]:
    """A gradient step on each minibatch: the next parameters and optimiser state, and metrics `[updates]`."""

    def update(carry, indices):
        params, opt_state = carry
        minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
        gradient, metrics = jax.grad(loss, has_aux=True)(params, minibatch)
        steps, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return (optax.apply_updates(params, steps), opt_state), metrics

    order = minibatch_order(key, len(batch.action))
    (params, opt_state), metrics = jax.lax.scan(update, (params, opt_state), order)
    return params, opt_state, metrics


# --- The iteration, and the run --------------------------------------------------------------------------------------


def train_step(state: State) -> tuple[State, dict]:
    """One iteration: play, compare, learn. A pure function, from state to state."""
    key, key_reset, key_actions, key_update, key_env = jax.random.split(state.key, 5)
    rollout = play(state.params, key_reset, key_actions, key_env)
    batch = compare(state.reference_params, rollout)
    params, opt_state, metrics = learn(state.params, state.opt_state, batch, key_update)
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics["episode/return_mean"] = jnp.mean(jnp.sum(rollout.reward, axis=0))
    metrics["environment/steps"] = jnp.sum(rollout.valid)
    return state._replace(params=params, opt_state=opt_state, key=key), metrics


def train(key: jax.Array) -> tuple[State, dict]:
    """A whole run of one seed: the last state, and metrics `[iterations]`."""
    return jax.lax.scan(lambda state, _: train_step(state), init(key), length=NUM_ITERATIONS)


if __name__ == "__main__":
    states, metrics = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), NUM_SEEDS))
    steps = metrics["environment/steps"].cumsum(axis=1).mean(axis=0)
    for so_far, returns in zip(steps, metrics["episode/return_mean"].T, strict=True):
        print(f"{so_far:9,.0f} steps: mean return {returns.mean():5.1f}, worst seed {returns.min():5.1f}")
