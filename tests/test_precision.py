"""Every function on plain arrays takes numbers of any type, and computes with float32 at least."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from grpo_jax import baselines, objectives
from grpo_jax.policies import sampling

T, N, G, F, E, A = 6, 8, 2, 3, 2, 5  # steps, rollouts, groups, final states, elements of a state, actions
RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
MASK, TERMINATED, TRUNCATED = np.arange(T)[:, None] < RNG.integers(1, T + 1, N), *(RNG.random((2, T, N)) < 0.15)
MASK, TERMINATED, TRUNCATED = (jnp.asarray(x) for x in (MASK, TERMINATED, TRUNCATED))
CLIP = {"clip_low": 0.2, "clip_high": 3e-4}
TRACE = {"discount": 0.9, "gae_lambda": 0.8}
STEPS, FINALS, GROUPS, PARTS = (T, N), (F, N), (G, N // G), (3, G, N // G)


def bound(function, *arguments, **options):
    """The function of its real arguments alone; ellipses stand for them."""

    def of_reals(*reals):
        reals = iter(reals)
        return function(*(next(reals) if argument is ... else argument for argument in arguments), **options)

    return of_reals


def of_window(function, **options):
    """The function of the features, the final features and the rewards of a `Window`."""
    flags = TERMINATED, TRUNCATED, MASK
    return lambda *reals: function(baselines.Window(*reals, *flags), **options)


def given(name, number, *others, shape=STEPS, **options):
    """(name, (the function of so many arrays of a shape, with others behind them, and those shapes))."""
    return name, (bound(getattr(objectives, name), *[...] * number, *others, **options), *[shape] * number)


OF_GROUPS = "group_normalized group_centered leave_one_out batch_normalized pass_at_k max_rl"
OF_STEPS = "whiten scale_by_rms mean_over_steps mean_of_sequence_means mean_of_sequence_sums sum_over_horizon"
OF_TWO = "weighted_sum value_loss unclipped_surrogate policy_gradient_surrogate sapo_surrogate"
OF_TWO += " k1 k2 k3 k3_from_behaviour k2_straight_through"
# The function of arrays of real numbers, and the shapes of those.
FUNCTIONS = dict(
    [given(name, 1, shape=GROUPS) for name in OF_GROUPS.split()]
    + [given(name, 1) for name in (*OF_STEPS.split(), "importance_ratio")]
    + [given(name, 2) for name in OF_TWO.split()]
    + [
        given("process_supervised", 1, MASK, N // G),
        given("near_behaviour", 2, limit=0.1),
        given("high_entropy", 1, MASK),
        given("on_policy_sequences", 3, MASK, limit=0.1),
        given("gae", 3, TERMINATED, TRUNCATED, **TRACE),
        given("discounted_returns", 1, TERMINATED, discount=0.9),
        given("same_step_leave_one_out", 1, MASK, N // G),
        given("explained_variance", 2, MASK),
        given("ppo_loss", 7, MASK),
        given("sequence_log_ratio", 1, MASK),
        given("sequence_token_log_ratio", 1, MASK),
        given("clipped_surrogate", 2, **CLIP, dual_clip=3.0),
        given("clip_fractions", 2, **CLIP),
        given("exact", 2, shape=(T, A)),
        given("adaptive_coefficient", 2, shape=(), target=0.01),
        given("adaptive_entropy_coefficient", 2, shape=(), target=0.1),
    ]
) | {
    "kernel_values": (of_window(baselines.kernel_values, discount=0.9, bandwidth=0.2), (T, N, E), (F, N, E), STEPS),
    "same_state_advantage": (bound(baselines.same_state_advantage, ..., ..., MASK, N // G), STEPS, (T, N, E)),
    "bootstrapped_returns": (
        bound(objectives.bootstrapped_returns, ..., ..., TERMINATED, TRUNCATED, discount=0.9),
        *(STEPS, FINALS),
    ),
    "decoupled_normalized": (bound(objectives.decoupled_normalized, ..., ...), PARTS, (3,)),
    "grpo_loss": (
        lambda log_prob, behaviour, advantages, reference: objectives.grpo_loss(
            log_prob, behaviour, advantages, MASK, reference_log_prob=reference, kl_coef=0.1
        ),
        *[STEPS] * 4,
    ),
    "most_probable": (bound(sampling.most_probable, ..., 3.0, 0.9), (T, A)),
}
HALF = [jnp.float16, jnp.bfloat16]


def numbers(name, dtype, scale=1.0):
    function, *shapes = FUNCTIONS[name]
    rng = np.random.default_rng(1)
    drawn = [np.asarray(3 * scale * rng.normal(size=shape), np.float32) for shape in shapes]

    def named(*arguments):
        try:
            return function(*arguments)
        except Exception as error:
            error.add_note(f"in {name} of {jnp.dtype(dtype)}")
            raise

    return named, [jnp.asarray((x > 0 if dtype == jnp.bool_ else x).astype(dtype)) for x in drawn]


def equations(jaxpr):
    """All of a program, those of its inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


MOVES = {
    *("broadcast_in_dim", "concatenate", "dynamic_slice", "jit", "pad", "reshape", "select_n", "slice", "squeeze"),
    "stop_gradient",
}


def with_dtypes(*dtypes):
    """(what an error says, name, dtype) of every function with every type of numbers."""
    return [(f"{name} of {jnp.dtype(dtype)}", name, dtype) for name in FUNCTIONS for dtype in dtypes]


def test_nothing_is_computed_with_less_than_float32():
    offenders = []
    for case, name, dtype in with_dtypes(jnp.bfloat16, jnp.int32, jnp.bool_):
        function, given = numbers(name, dtype)
        program = jax.make_jaxpr(function)(*given)
        found = {leaf.dtype for leaf in program.out_avals} - {jnp.dtype("float32"), jnp.dtype("bool")}
        offenders += [f"{case} returns {other}" for other in found]
        for equation in equations(program.jaxpr):
            arrays = [x.aval for x in equation.outvars if x.aval.shape]
            narrow = any(x.dtype in (jnp.float16, jnp.bfloat16) for x in arrays)
            offenders += [f"{case}: {equation}"] if narrow and equation.primitive.name not in MOVES else []
    assert not offenders, "\n".join(offenders)


def test_double_precision_stays():
    offenders = []
    with jax.enable_x64(True):
        for case, name, dtype in with_dtypes(jnp.float64, jnp.int32):
            function, given = numbers(name, dtype)
            found = {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(function, *given))}
            offenders += [f"{case} returns {x}" for x in found - {jnp.dtype(float), jnp.dtype(bool)}]
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize("dtype", HALF)
def test_equal_scores_give_exactly_zero(dtype):
    @jax.jit
    def estimates(scores, mask):
        estimators = objectives.group_normalized, objectives.batch_normalized, objectives.whiten
        of_nothing = objectives.whiten(scores, mask), objectives.scale_by_rms(jnp.zeros_like(scores))
        return *(estimator(scores) for estimator in estimators), *of_nothing

    for estimate in estimates(np.full((2, 4), 0.1, dtype), np.ones((2, 4), bool)):
        np.testing.assert_array_equal(estimate, 0.0)
