"""The public names, their signatures, and a docstring on each of them."""

import ast
import importlib
import inspect
import pkgutil

import pytest

import grpo_jax
from grpo_jax import Config, Hyperparams, environments, language, objectives, policies, recording
from grpo_jax.policies import Architecture

PROMISED = {
    *("Config", "Hyperparams", "Algorithm", "GRPO", "PPO", "TrainState", "make_init", "make_train_step", "run"),
    *("evaluate", "generate", "grpo_loss", "ppo_loss", "objectives", "policies", "environments", "recording"),
    *("ANCHORED", "CONTINUE", "FRESH", "forked", "with_reference", "make_mesh", "recorded_run", "answer", "warm_start"),
    *("TrainedPolicy", "load", "reached_return", "no_progress", "__version__"),
}
MODULES = sorted(module.name for module in pkgutil.walk_packages(grpo_jax.__path__, "grpo_jax."))
each_module = pytest.mark.parametrize("name", MODULES)

SIGNATURES = {
    "Config": {"environment", "algorithm", "num_envs", "group_size", "num_steps", "num_epochs", "num_minibatches"}
    | {"hidden_sizes"},
    "Hyperparams": {"learning_rate", "final_learning_rate", "discount", "gae_lambda", "clip_low", "clip_high"}
    | {"kl_coef", "entropy_coef", "value_coef", "max_grad_norm"},
    "make_init": {"config"},
    "make_train_step": {"config"},
    "objectives.group_normalized": {"scores", "eps", "ddof"},
    "objectives.group_centered": {"scores"},
    "objectives.leave_one_out": {"scores"},
    "objectives.clipped_surrogate": {"log_ratio", "advantages", "clip_low", "clip_high"},
    "objectives.k1": {"log_prob", "reference_log_prob"},
    "objectives.k2": {"log_prob", "reference_log_prob"},
    "objectives.k3": {"log_prob", "reference_log_prob"},
}


def test_all_is_what_was_promised_and_what_is_there():
    assert PROMISED <= set(grpo_jax.__all__)
    assert len(set(grpo_jax.__all__)) == len(grpo_jax.__all__)
    for name in grpo_jax.__all__:
        assert getattr(grpo_jax, name) is not None
    assert dir(grpo_jax) == sorted(grpo_jax.__all__), "what a completion shows"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_have_the_promised_arguments(name):
    value = grpo_jax
    for part in name.split("."):
        value = getattr(value, part)
    assert SIGNATURES[name] <= set(inspect.signature(value).parameters)


@pytest.mark.parametrize("module", [grpo_jax, objectives, policies, environments, language, recording])
def test_public_functions_are_annotated(module):
    for name in module.__all__:
        if inspect.isfunction(function := getattr(module, name)):
            signature = inspect.signature(function)
            annotations = [parameter.annotation for parameter in signature.parameters.values()]
            assert inspect.Signature.empty not in (*annotations, signature.return_annotation), name


def test_everything_in_a_config_has_a_default():
    assert Config() == Config()
    assert Hyperparams().replace(learning_rate=0.5).learning_rate == 0.5


def test_num_groups_follows():
    assert Config(num_envs=48, group_size=16, num_minibatches=1).num_groups == 3


@each_module
def test_all_lists_only_what_exists(name):
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), public


@each_module
def test_everything_public_has_a_docstring(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__ and not value.__doc__.startswith(f"{attribute}("), attribute
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if not method.startswith("_") and value.__doc__ and inspect.isfunction(function):
                    assert function.__doc__ or method == "replace", f"{attribute}.{method}"


@pytest.mark.parametrize("settings", [Architecture, Config, Hyperparams])
def test_every_setting_is_explained(settings):
    """The command line takes its help from these lines."""
    body = ast.parse(inspect.getsource(settings)).body[0].body
    for node, following in zip(body, body[1:], strict=False):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(following, ast.Expr) and isinstance(following.value.value, str), node.target.id
