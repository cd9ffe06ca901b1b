"""Every execution plan gives the same numbers, to rounding."""

import contextlib
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Parts, Probe, copy_task

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, with_reference
from grpo_jax.devices import execution_plan
from grpo_jax.devices.execution_plan import CPU, GPU, HOPPER, TPU, resolve_plan
from grpo_jax.errors import ConfigError
from grpo_jax.groups import forked
from grpo_jax.policies import MLP, Transformer
from grpo_jax.updates.orders import minibatch_order

SMALL = {"num_envs": 8, "network": MLP((8, 8)), "num_minibatches": 2, "num_epochs": 2}
SORT = {"environment": "tokens:sort-3", "group_size": 4, "num_epochs": 4}
FIELDS = {
    "ppo": {"algorithm": "ppo", "num_steps": 12, "normalize_observations": True, "normalize_rewards": True},
    "grpo": {"environment": Probe(), "algorithm": with_reference(GRPO), "group_size": 4, "num_microbatches": 2},
    "parts": {"environment": Parts(), "algorithm": "ppo", "num_steps": 6}
    | {"normalize_observations": True, "network": MLP((8, 8), actor_observation=("position", "velocity"))},
    "real actions": {"environment": "Pendulum-v1", "algorithm": "kernel_gae", "num_steps": 8},
    "images": {"environment": "Breakout-MinAtar", "algorithm": "ppo", "num_envs": 4, "num_steps": 4},
    "gru": {"algorithm": "ppo", "num_envs": 4, "num_steps": 6}
    | {"network": MLP((8, 8), recurrent="gru", recurrent_size=4)},
    "tokens": SORT | {"network": Transformer(width=16, num_layers=1, num_heads=2)},
    "adapters": SORT | {"network": Transformer(width=8, num_layers=1, num_heads=2, lora_rank=2)},
    "forked": {"environment": Probe(), "env_params": {"max_steps_in_episode": 6, "bonus": 1.0}}
    | {"algorithm": GRPO._replace(start=forked(9)), "group_size": 4, "num_steps": 4, "starts_per_rollout": 1}
    | {"network": MLP((8, 8), recurrent="mingru", recurrent_size=4)},
    "adamw": {"environment": Probe(), "algorithm": "ppo", "num_envs": 4, "num_steps": 6, "optimizer": "adamw"},
}
OPTIMIZER = {"adamw": {"weight_decay": 0.5}}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_plans_agree(name):
    """Two train steps with the plan of a TPU, in which every layout differs, and with that of a CPU.

    The update alone is in `test_optimizers.py`, the rollout alone in `test_resets.py` and `test_stopping.py`.
    """
    results = []
    for plan in (CPU, dataclasses.replace(TPU, steps_per_loop=3, value_passes=3)):
        config = Config(**SMALL | FIELDS[name], execution_plan=plan)
        hyperparams = Hyperparams(learning_rate=1e-3, entropy_coef=0.01, total_steps=1e6, **OPTIMIZER.get(name, {}))
        train_step = make_train_step(config)
        state = jax.jit(make_init(config))(jax.random.key(0), hyperparams)
        state, metrics = jax.jit(lambda state, f=train_step: jax.lax.scan(lambda s, _: f(s), state, length=2))(state)
        results.append((state.replace(key=jax.random.key_data(state.key)), metrics))
    cpu, gpu = results
    assert jax.tree.structure(cpu) == jax.tree.structure(gpu)
    paths = jax.tree_util.tree_leaves_with_path(cpu)
    for (path, one), other in zip(paths, jax.tree.leaves(gpu), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, path
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5, err_msg=jax.tree_util.keystr(path))


def test_a_plan_is_found_by_name_or_backend_and_checked():
    assert resolve_plan("gpu") == GPU
    assert resolve_plan("auto") == resolve_plan(jax.default_backend())
    assert resolve_plan("hopper") == HOPPER == Config(execution_plan="hopper").plan
    assert Config(execution_plan=GPU).plan is GPU
    with pytest.raises(ConfigError, match="unknown execution_plan 'gpuu': did you mean 'gpu'"):
        Config(execution_plan="gpuu")
    with pytest.raises(ConfigError, match="unknown execution_plan {'value_passes': 1}: known: auto, cpu"):
        Config(execution_plan={"value_passes": 1})


@pytest.mark.parametrize("capability, plan", [("9.0", HOPPER), ("10.0", GPU), ("gfx942", GPU)])
def test_hopper_is_known_by_its_compute_capability(capability, plan, monkeypatch):
    device = SimpleNamespace(compute_capability=capability, device_kind="a device")
    values = {"default_backend": lambda: "gpu", "devices": lambda: [device], "__version_info__": (0, 11)}
    for name, value in values.items():
        monkeypatch.setattr(jax, name, value)
    assert resolve_plan("auto") == plan
    with contextlib.nullcontext() if plan is HOPPER else pytest.raises(ConfigError, match="this is a device; use"):
        assert resolve_plan("hopper") is HOPPER


def test_the_plan_names_every_file_that_chooses_by_platform():
    package = Path(execution_plan.__file__).parents[1]
    chooses = re.compile(r"platform_dependent\(|optimization_barrier\(|devices.*\.platform ==")
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if chooses.search(path.read_text())}
    assert files <= set(re.findall(r"`([\w/]+\.py)`", execution_plan.__doc__))


def test_every_minibatch_has_an_equal_share_of_each_block():
    mask = jnp.ones((2, 24), bool).at[:, 4:12].set(False)  # of the first block only one group of four is valid
    tokens = {"environment": copy_task(), "num_envs": 24, "group_size": 4, "share_prompts": True}
    config = Config(**tokens, shuffle_blocks=2, num_minibatches=3, num_epochs=1)
    order = jax.jit(lambda key: minibatch_order(config, key, mask))(jax.random.key(0))
    assert order.shape == (3, 2, 4)
    for block in np.swapaxes(order, 0, 1):
        assert sorted(block.ravel()) == list(range(12)), "each sequence once, counted within its block"
        assert (np.diff(block, axis=1) == 1).all() and (block[:, 0] % 4 == 0).all(), "members stay together"
    assert (order[0, 0] == np.arange(4)).all(), "the valid group comes first"


def test_blocks_must_be_equal():
    with pytest.raises(ConfigError, match="shuffle_blocks=3 does not divide the 32 environments"):
        Config(algorithm="ppo", shuffle_blocks=3)
    with pytest.raises(ConfigError, match="shuffle_blocks = 32 is not divisible by num_minibatches=3"):
        Config(algorithm="ppo", num_steps=8, shuffle_blocks=8, num_minibatches=3)
