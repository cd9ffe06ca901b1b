"""A program of a user, for mypy to check; no test runs it."""

import jax

from grpo_jax import GRPO, Config, Hyperparams, TrainState, evaluate, make_init, make_train_step, run, with_reference

config = Config(environment="CartPole-v1", algorithm=with_reference(GRPO), num_envs=8)
hyperparams = Hyperparams(learning_rate=1e-3).replace(discount=0.9)
keys = jax.random.split(jax.random.key(0), 2)
state: TrainState = make_init(config)(keys[0], hyperparams)
state, metrics = make_train_step(config)(state)
result = run(config, hyperparams, keys)
returns: jax.Array = evaluate(config, state, keys[0], num_episodes=4).returns
print(metrics["episode/return_mean"], result.steps, config.num_groups, returns, state.replace(iteration=0))
