"""The public names, their signatures, and a line for every setting."""

import ast
import inspect
import subprocess
import sys

import grpo_jax
from grpo_jax import Config, Hyperparams
from grpo_jax.policies import MLP, Transformer


def test_all_is_what_is_there():
    assert len(set(grpo_jax.__all__)) == len(grpo_jax.__all__)
    for name in grpo_jax.__all__:
        assert getattr(grpo_jax, name) is not None
    assert dir(grpo_jax) == sorted(grpo_jax.__all__), "what a completion shows"


def test_a_name_is_imported_at_its_first_use():
    """A program that takes only the formulas waits for nothing else of the library."""
    script = """
import sys, grpo_jax
assert "jax" not in sys.modules
from grpo_jax.objectives import grpo_loss
assert grpo_jax.grpo_loss is grpo_loss
print(*sorted({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("grpo_jax.")}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = "errors hyperparams objectives precision types"
    assert done.stdout.split() == [f"grpo_jax.{module}" for module in modules.split()]


def test_every_setting_is_explained():
    """The command line takes its help from these lines."""
    for settings in (MLP, Transformer, Config, Hyperparams):
        body = ast.parse(inspect.getsource(settings)).body[0].body
        for node, following in zip(body, body[1:], strict=False):
            if isinstance(node, ast.AnnAssign):
                assert isinstance(following, ast.Expr) and isinstance(following.value.value, str), node.target.id
