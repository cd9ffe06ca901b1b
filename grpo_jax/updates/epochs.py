"""Epochs of minibatches: gradient steps with any optimiser."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import Config
from grpo_jax.devices.mesh import along_envs, num_env_devices, on_every_device
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.reductions import mean_or_missing
from grpo_jax.policies import Policy, bind_frozen, combine, partition
from grpo_jax.types import Batch, Metrics, PyTree, TrainState
from grpo_jax.updates.loss import RATIO_MAX
from grpo_jax.updates.minibatches import StackedMetrics, make_gradient, make_minibatch
from grpo_jax.updates.optimizers import make_flattening
from grpo_jax.updates.orders import minibatch_order


class Learner(NamedTuple):
    """The values that a gradient step changes."""

    params: PyTree  # also the frozen ones
    opt_state: Any  # of those that are trained


def update_epochs(
    config: Config,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    hyperparams: Hyperparams,
    key: jax.Array,
) -> tuple[Learner, Metrics]:
    """Gradient descent on the loss: `num_epochs` passes over the batch, each in another random order.

    The valid samples of a pass are dealt out evenly over its minibatches, as whole groups where these stay together. An
    update whose loss or gradient is not finite changes nothing and is counted in `optim/skipped_updates`; one without a
    valid sample, or after the KL to the behaviour policy exceeded `kl_limit`, changes nothing either. The other metrics
    are means over the updates that were applied, `policy/ratio_max` their maximum.

    Args:
      config: numbers of epochs and minibatches, and the slots of the loss.
      policy: as it acted.
      optimizer: of the parameters that are trained.
      state: the parameters and the optimiser's state to start from.
      batch: the samples.
      hyperparams: every coefficient.
      key: of the orders.
    """
    trained, frozen = partition(policy, state.params)
    policy = bind_frozen(policy, frozen)
    flatten, unflatten = make_flattening(config, trained)
    # A vector in the loop's carry saves a copy of each parameter, but XLA would not fuse a bias in it with its product.
    is_flat = config.has_kernel
    # Blocks stay where they were played if each device has whole ones. Otherwise minibatches mix all environments, and
    # these are gathered once, rather than communicated in each update.
    batch = on_every_device(batch) if config.shuffle_blocks % num_env_devices() else along_envs(batch, axis=1)

    gradient_of = make_gradient(config, policy, batch, hyperparams, flatten)
    make = functools.partial(make_minibatch, config, batch, hyperparams)

    def update(carry, minibatch):
        learner, within_limit = carry
        if not config.plan.minibatches_ahead:
            minibatch = make(minibatch)

        # The gradient, and the step that the optimiser makes of it.
        params = unflatten(learner.params) if is_flat else learner.params
        stacked, gradient = gradient_of(params, minibatch)
        metrics, grad_norm = stacked.as_dict(), optax.tree.norm(gradient)
        old = Learner(flatten(params), learner.opt_state)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            steps, opt_state = optimizer.update(gradient, old.opt_state, old.params)
            new = Learner(optax.apply_updates(old.params, steps), opt_state)

        # The step is made unless something is not finite, nothing is valid, or the policy has moved too far.
        finite = jnp.isfinite(metrics.pop("loss")) & jnp.isfinite(grad_norm)
        within_limit &= ~(metrics["policy/kl_behaviour"] > hyperparams.kl_limit)
        applied = finite & within_limit & (minibatch.num_valid > 0)
        learner = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)
        record = metrics | {"optim/grad_norm": grad_norm, "applied": applied, "finite": finite}
        learner = learner if is_flat else learner._replace(params=unflatten(learner.params))
        return (learner, within_limit), StackedMetrics.stack(record)

    minibatches = minibatch_order(config, key, batch.mask)
    if config.plan.minibatches_ahead:
        minibatches = jax.vmap(make)(minibatches)
    start = Learner(flatten(trained) if is_flat else trained, state.opt_state), jnp.array(True)
    (learner, _), records = jax.lax.scan(update, start, minibatches)
    each = records.as_dict()
    applied, finite = each["applied"] > 0, each["finite"] > 0
    summary = records.replace(values=mean_or_missing(records.values, applied[:, None], axis=0)).as_dict()
    del summary["applied"], summary["finite"]
    summary[RATIO_MAX] = jnp.max(each[RATIO_MAX], where=applied, initial=0.0)
    summary["optim/skipped_updates"] = jnp.sum(~finite).astype(jnp.float32)
    params = unflatten(learner.params) if is_flat else learner.params
    return Learner(combine(params, frozen), learner.opt_state), summary
