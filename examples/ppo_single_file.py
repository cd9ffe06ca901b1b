"""PPO in one file: gymnax plays, flax acts, optax learns, and the loss is written out.

    python examples/ppo_single_file.py

trains eight seeds on CartPole-v1 in one compiled program. Read it from top to bottom, then copy it and change it: a
state goes into `train_step`, the next state comes out, and the rest is `jit`, `vmap` and `scan`. `grpo_jax.run` does
the same for any environment, network and algorithm.

Shapes: T steps of B environments are `[T, B]`; a minibatch of N steps is `[N]`.
PPO: https://arxiv.org/abs/1707.06347. Generalised advantage estimation: https://arxiv.org/abs/1506.02438.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

from grpo_jax.objectives import gae, whiten

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
NUM_SEEDS = 8
NUM_ITERATIONS = 40

NUM_ENVS = 32  # B
NUM_STEPS = 128  # T, of each environment in one rollout
NUM_EPOCHS = 4  # passes over a rollout
NUM_MINIBATCHES = 8  # gradient steps in each pass

LEARNING_RATE = optax.linear_schedule(2e-3, 0.0, NUM_ITERATIONS * NUM_EPOCHS * NUM_MINIBATCHES)
MAX_GRAD_NORM = 0.5
DISCOUNT = 0.99
GAE_LAMBDA = 0.95  # 0 trusts the critic after one step, 1 not before the episode's end
CLIP = 0.2  # the probability ratio gets no gradient beyond 1 - CLIP and 1 + CLIP
VALUE_COEF = 0.5
ENTROPY_COEF = 0.01


# --- The policy ------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Two hidden layers. The output begins close to 0: a uniform policy, and values of 0."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., features]` to `[..., num_outputs]`."""
        for _ in range(2):
            x = nn.tanh(nn.Dense(64)(x))
        return nn.Dense(self.num_outputs, kernel_init=nn.initializers.normal(1e-3))(x)


ACTOR, CRITIC = MLP(ENV.num_actions), MLP(1)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(LEARNING_RATE, eps=1e-5))


def log_probs_of(params: Any, observation: jax.Array) -> jax.Array:
    """`[..., num_actions]`: the log-probability of each action."""
    return jax.nn.log_softmax(ACTOR.apply({"params": params["actor"]}, observation))


def value_of(params: Any, observation: jax.Array) -> jax.Array:
    """`[...]`: the critic's estimate of the discounted return from here on."""
    return CRITIC.apply({"params": params["critic"]}, observation)[..., 0]


def chosen(log_probs: jax.Array, action: jax.Array) -> jax.Array:
    """`[..., num_actions]` to `[...]`: the entries of the actions that were taken."""
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


# --- The state -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """All that an iteration hands to the next one. It has arrays only, so it can be vmapped, scanned and saved."""

    params: Any
    opt_state: Any
    env_state: Any  # of gymnax, each leaf [B]
    observation: jax.Array  # [B, ...], of env_state
    episode_return: jax.Array  # [B], so far
    key: jax.Array


def init(key: jax.Array) -> State:
    """The state before the first iteration."""
    key, key_params, key_reset = jax.random.split(key, 3)
    observation, env_state = jax.vmap(ENV.reset, (0, None))(jax.random.split(key_reset, NUM_ENVS), ENV_PARAMS)
    networks = {"actor": ACTOR, "critic": CRITIC}
    keys = dict(zip(networks, jax.random.split(key_params), strict=True))
    params = {name: network.init(keys[name], observation)["params"] for name, network in networks.items()}
    return State(params, OPTIMIZER.init(params), env_state, observation, jnp.zeros(NUM_ENVS), key)


# --- 1. Play ---------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """What happened, each leaf `[T, B, ...]`."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array  # of the action, under the parameters that chose it
    reward: jax.Array
    terminated: jax.Array  # the task has ended the episode: nothing more is to be had
    truncated: jax.Array  # the time limit has: more was to be had, which the critic estimates
    next_observation: jax.Array  # of the same episode, also where it ends
    episode_return: jax.Array  # so far, whole where the episode ends


def play(state: State, key_env: jax.Array, key_actions: jax.Array) -> tuple[State, Rollout]:
    """NUM_STEPS steps in each environment. Episodes follow one another, and go on in the next iteration."""
    # All random numbers of the actions at once: argmax(logits + Gumbel noise) is a sample of the softmax of the logits.
    noise = jax.random.gumbel(key_actions, (NUM_STEPS, NUM_ENVS, ENV.num_actions))
    env_keys = jax.random.split(key_env, (NUM_STEPS, NUM_ENVS))

    def step(state, xs):
        noise, keys = xs
        log_probs = log_probs_of(state.params, state.observation)
        action = jnp.argmax(log_probs + noise, axis=-1)
        env_step = jax.vmap(ENV.step, (0, 0, 0, None))  # which resets an environment whose episode has ended
        observation, env_state, reward, terminated, truncated, info = env_step(
            keys, state.env_state, action, ENV_PARAMS
        )
        episode_return = state.episode_return + reward
        record = Rollout(
            observation=state.observation,
            action=action,
            log_prob=chosen(log_probs, action),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            next_observation=info["final_observation"],
            episode_return=episode_return,
        )
        going_on = ~(terminated | truncated)
        return state._replace(
            env_state=env_state, observation=observation, episode_return=episode_return * going_on
        ), record

    return jax.lax.scan(step, state, (noise, env_keys))


# --- 2. Compare ------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What the updates need of each step, each leaf `[T * B, ...]`; it stays the same during the epochs."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array  # how much better the action was than the critic had expected
    target: jax.Array  # what the critic should have expected


def compare(params: Any, rollout: Rollout) -> Batch:
    """Advantages by the critic: A_t = Σ_k (discount λ)^k (r + discount V(s') - V(s))_{t+k}."""
    value = value_of(params, rollout.observation)
    advantage = gae(
        rollout.reward,
        value,
        value_of(params, rollout.next_observation),
        rollout.terminated,
        rollout.truncated,
        discount=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
    )
    batch = Batch(rollout.observation, rollout.action, rollout.log_prob, advantage, advantage + value)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)


# --- 3. Learn --------------------------------------------------------------------------------------------------------


def loss(params: Any, batch: Batch) -> tuple[jax.Array, dict]:
    """PPO's loss of a minibatch, written out, and its metrics. It equals `grpo_jax.objectives.ppo_loss`."""
    log_probs = log_probs_of(params, batch.observation)
    ratio = jnp.exp(chosen(log_probs, batch.action) - batch.log_prob)  # 1 before the first update
    advantage = whiten(batch.advantage)  # mean 0, standard deviation 1
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    value_loss = 0.5 * jnp.square(value_of(params, batch.observation) - batch.target)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    metrics = {"policy/entropy": jnp.mean(entropy), "loss/value": jnp.mean(value_loss)}
    return jnp.mean(VALUE_COEF * value_loss - surrogate - ENTROPY_COEF * entropy), metrics


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
    key, key_env, key_actions, key_update = jax.random.split(state.key, 4)
    state, rollout = play(state, key_env, key_actions)
    batch = compare(state.params, rollout)
    params, opt_state, metrics = learn(state.params, state.opt_state, batch, key_update)
    metrics = jax.tree.map(jnp.mean, metrics)
    ended = rollout.terminated | rollout.truncated
    metrics["episode/return_mean"] = jnp.mean(rollout.episode_return, where=ended)  # NaN if none has ended
    return state._replace(params=params, opt_state=opt_state, key=key), metrics


def train(key: jax.Array) -> tuple[State, dict]:
    """A whole run of one seed: the last state, and metrics `[iterations]`."""
    return jax.lax.scan(lambda state, _: train_step(state), init(key), length=NUM_ITERATIONS)


if __name__ == "__main__":
    states, metrics = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), NUM_SEEDS))
    for i, returns in enumerate(metrics["episode/return_mean"].T, start=1):
        steps = i * NUM_ENVS * NUM_STEPS
        print(f"{steps:7,} steps: mean return {returns.mean():5.1f}, worst seed {returns.min():5.1f}")
