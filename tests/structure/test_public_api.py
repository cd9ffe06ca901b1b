"""The public names, their signatures, and a line for every setting."""

import ast
import inspect

import grpo_jax
from grpo_jax import Config, Hyperparams
from grpo_jax.policies import MLP, Transformer


def test_all_is_what_is_there():
    assert len(set(grpo_jax.__all__)) == len(grpo_jax.__all__)
    for name in grpo_jax.__all__:
        assert getattr(grpo_jax, name) is not None
    assert dir(grpo_jax) == sorted(grpo_jax.__all__), "what a completion shows"


def test_every_setting_is_explained():
    """The command line takes its help from these lines."""
    for settings in (MLP, Transformer, Config, Hyperparams):
        body = ast.parse(inspect.getsource(settings)).body[0].body
        for node, following in zip(body, body[1:], strict=False):
            if isinstance(node, ast.AnnAssign):
                assert isinstance(following, ast.Expr) and isinstance(following.value.value, str), node.target.id
