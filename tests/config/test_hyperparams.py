import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits, check

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, run
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import completed
from grpo_jax.objectives import EntropyHyperparams, SapoHyperparams, adaptive_entropy_coefficient, with_hyperparams
from grpo_jax.policies import MLP
from grpo_jax.training.checks import check_read

FIELDS = [field.name for field in dataclasses.fields(Hyperparams)]
OPTIONAL = ["warmup", "num_iterations", "max_episodes", "critic_lambda", "beta1", "beta2", "weight_decay"]
LIMITS = "total_steps max_episodes clip_low clip_high value_clip kl_limit reward_clip max_grad_norm".split()
SIZES = {"environment": Probe(), "num_envs": 4, "num_minibatches": 1, "network": MLP((4,))}
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
CONFIG = Config(algorithm="ppo", num_steps=8, num_epochs=2, **SIZES, **NORMALIZED)


def test_every_value_is_a_number_that_means_something():
    offenders = [math.nan, math.inf, -math.inf, 1e39, -1e39, 1e-50, None, "0.1", ["0.1"], (0.1,), {}, 1j]
    offenders += [np.array(value) for value in offenders if isinstance(value, float)]
    accepted = []
    for name in FIELDS:
        for value in offenders:
            try:
                Hyperparams(**{name: value}).check()
                accepted.append((name, value))
            except ConfigError as error:
                assert str(error).startswith(f"{name}="), error
    assert [name for name, value in accepted if value is None] == OPTIONAL
    assert sorted(name for name, value in accepted if value is not None) == sorted(2 * LIMITS)
    assert all(value == math.inf for _, value in accepted if value is not None)


@pytest.mark.parametrize("value", [1e-50, "0.1"])
def test_invalid_values_stop_a_run_before_anything_else(value):
    hyperparams = Hyperparams(total_steps=1e3, adam_eps=value)
    with pytest.raises(ConfigError, match="adam_eps="):
        run(CONFIG, hyperparams, jax.random.split(jax.random.key(0), 1))
    with pytest.raises(ConfigError, match="adam_eps="):
        make_init(CONFIG)(jax.random.key(0), hyperparams)


class Mine(Hyperparams):
    softness: float = 0.5
    center: float | None = None


def test_what_is_printed_is_what_differs_and_no_screens_of_numbers():
    assert repr(Mine(softness=0.25, discount=0.9)) == "Mine(discount=0.9, softness=0.25)"
    many = repr(Mine(learning_rate=jnp.linspace(0, 1, 99), softness=np.full(99, 2.0)))
    assert many == "Mine(learning_rate=float32[99] from 0 to 1, softness=2)"
    shown = []
    jax.eval_shape(lambda x: shown.append(repr(Mine(softness=x))), 1.0)
    assert shown == ["Mine(softness=float32[])"]


def test_own_hyperparameters_may_be_infinite_but_not_missing():
    Mine(softness=math.inf).check()
    for value in (math.nan, None, "text", 1e39):
        with pytest.raises(ConfigError, match="softness="):
            Mine(softness=value).check()


def test_infinite_limits_train_as_very_large_ones():
    limits = [name for name in LIMITS if name != "max_episodes"]

    def rows(value):
        defaults = np.array([getattr(Hyperparams, name) for name in limits])
        values = np.where(np.eye(len(limits), dtype=bool), value, defaults)
        return Hyperparams(**dict(zip(limits, values.T, strict=True))).broadcast(len(limits))

    @jax.jit
    @jax.vmap
    def trained(hyperparams):
        state, _ = make_train_step(CONFIG)(make_init(CONFIG)(jax.random.key(0), hyperparams))
        return state.params

    unlimited, large = trained(rows(jnp.inf)), trained(rows(1e30))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(unlimited))
    assert bits(unlimited) == bits(large)


# --- numbers of single methods, and what nothing reads ----------------------------------------------------------------

SMALL = SIZES | {"group_size": 2}
KEYS = jax.random.split(jax.random.key(0), 2)
HELD = GRPO._replace(
    entropy_controller=with_hyperparams(adaptive_entropy_coefficient, target="entropy_target"),
    hyperparams=EntropyHyperparams,
)


def test_plain_hyperparameters_and_a_users_are_completed_for_an_algorithm():
    config, kinds = Config(algorithm="sapo", **SMALL), (Hyperparams, SapoHyperparams)
    stop = {"callback": lambda progress, chunk: progress._replace(stopped=np.array(True))}  # so that `init` suffices
    users = run(config, Mine(num_iterations=1), KEYS, **stop).states.hyperparams
    given = jax.jit(lambda key: [make_init(config)(key, kind(num_iterations=1)).hyperparams for kind in kinds])
    plain, own = given(KEYS[0])
    assert type(plain) is type(own) is SapoHyperparams and isinstance(users, SapoHyperparams)
    assert users.softness[0] == 0.5 and bits(plain) == bits(own) and (own.sapo_tau_negative == np.float32(1.05)).all()
    assert type(completed(users, Mine)) is type(completed(Mine(), SapoHyperparams)) is type(users)


READ = {
    "by the step": ("grpo", {}, Hyperparams(clip_low=0.1, reward_clip=5.0)),
    "by the advantage": ("gigpo", {}, Hyperparams(score_ddof=1.0, score_eps=1e-4)),
    "by the critic": ("ppo", {}, Hyperparams(critic_lambda=np.array([0.9, 0.95]))),
    "by the controller": (HELD, {}, EntropyHyperparams(entropy_target=0.3, entropy_coef=0.1)),
    "by the host": ("grpo", {"schedule": "constant"}, Hyperparams(total_steps=1e4, max_episodes=9.0)),
    "the default in float32": ("grpo", {}, Hyperparams(gae_lambda=float(np.float32(0.95)), kl_target=np.full(2, 0.01))),
    "its own": ("sapo", {}, SapoHyperparams(sapo_tau_positive=2.0)),
}


@pytest.mark.parametrize("algorithm, fields, hyperparams", READ.values(), ids=READ)
def test_what_is_read_may_change(algorithm, fields, hyperparams):
    check_read((Config(algorithm=algorithm, **SMALL | fields), hyperparams))


UNREAD = {
    "trace": ("grpo", {}, {"gae_lambda": np.array([0.9, 0.95])}, r"by grpo: gae_lambda=.0\.9 +0\.95.; leave"),
    "critic": ("same_step_gae", {"num_steps": 4}, {"critic_lambda": 1.0}, "critic_lambda=1.0"),
    "clip": ("sapo", {}, {"clip_low": 0.1}, "clip_low=0.1"),
    "optimiser": ("ppo", {"optimizer": "sgd"}, {"beta2": 0.9, "weight_decay": 0.1}, "beta2=0.9, weight_decay=0.1"),
    "target": ("grpo", {}, {"kl_target": 0.5}, "kl_target=0.5"),
}


@pytest.mark.parametrize("algorithm, fields, numbers, message", UNREAD.values(), ids=UNREAD)
def test_what_nothing_reads_is_refused(algorithm, fields, numbers, message):
    with pytest.raises(ConfigError, match=message):
        run(Config(algorithm=algorithm, **SMALL | fields), Hyperparams(num_iterations=1, **numbers), KEYS)


def test_of_several_runs_one_is_enough_to_read_a_number():
    runs = [(Config(algorithm=name, **SMALL), SapoHyperparams(sapo_tau_positive=2.0)) for name in ("sapo", "grpo")]
    check_read(*runs)
    with pytest.raises(ConfigError, match="grpo or dapo: sapo_tau_positive=2.0; leave it out; .* is read by sapo"):
        check_read(runs[1], (Config(algorithm="dapo", **SMALL), Hyperparams()))


WITHOUT_CLASS = Config(algorithm=HELD._replace(hyperparams=Hyperparams), **SMALL)
OF_CLASSES = {
    "of SapoHyperparams: SapoHyperparams.sapo_tau_positive=2": lambda: Hyperparams(sapo_tau_positive=2.0),
    "a field of SamplingHyperparams": lambda: Hyperparams(top_k=5.0),
    "entropy_target.*of EntropyHyperparams: algorithm._replace.hyperparams=Entropy": lambda: check(WITHOUT_CLASS),
}


@pytest.mark.parametrize("message, make", OF_CLASSES.items())
def test_an_error_names_the_class_with_a_number(message, make):
    with pytest.raises(ConfigError, match=message):
        make()
