"""Checkpoints: what is read is what was saved, bitwise; damaged ones and those of other runs are refused."""

import functools
import shutil
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits

from grpo_jax import GRPO, Config, Hyperparams, run
from grpo_jax.errors import ConfigError
from grpo_jax.objectives import EntropyHyperparams, adaptive_coefficient, adaptive_entropy_coefficient, with_hyperparams
from grpo_jax.policies import MLP
from grpo_jax.recording.checkpoint import KEPT, Checkpoints
from grpo_jax.runs.progress import initial_progress
from grpo_jax.training.train import initial_states

KEYS = jax.random.split(jax.random.key(5), 3)
DESCRIPTION = {"name": "a", "config": {"num_envs": 8, "algorithm": {"start": "fresh_groups"}}}


def state(value=1.0):
    """Not a training state, but with all the kinds of leaves that those have."""
    return {
        "params": {"kernel": jnp.full((3, 2), value), "bias": jnp.array([np.nan, -0.0, np.inf])},
        "none": None,
        "empty": jnp.zeros((3, 0)),
        "key": jax.random.split(jax.random.key(int(value)), 3),
        "other": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "flags": jnp.array([True, False, True]),
        "bytes": jnp.arange(3, dtype=jnp.uint8),
        "half": jnp.ones(3, jnp.bfloat16),
    }


def progress(iteration):
    return initial_progress(state(float(iteration)), 3)._replace(
        steps=np.array([2**40 + iteration, 1, 2]), iteration=iteration, seconds=iteration / 8
    )


def save(path, iterations, description=DESCRIPTION):
    """Saves, and returns the iterations in the folder."""
    with Checkpoints(path, description) as checkpoints:
        for iteration in iterations:
            checkpoints.save(progress(iteration))
    return sorted(int(folder.name) for folder in path.iterdir() if folder.name.isdigit())


def restored(path, like=state, given=None, checksums=None, **arguments):
    with Checkpoints(path, DESCRIPTION, given=checksums) as checkpoints:
        return checkpoints.restore(jax.eval_shape(like), given=given, **arguments)


def test_what_is_read_is_what_was_saved(tmp_path):
    assert restored(tmp_path) is None
    save(tmp_path, [3])
    found, expected = restored(tmp_path), progress(3)
    assert bits(found.states) == bits(expected.states)
    assert jax.tree.structure(found.states) == jax.tree.structure(expected.states)
    assert (found.iteration, found.seconds, found.steps.dtype) == (3, 3 / 8, np.int64)
    assert np.array_equal(found.steps, expected.steps)


def test_what_was_given_is_not_saved_until_it_changes(tmp_path):
    kernel = np.random.default_rng(0).normal(size=(3, 300, 300)).astype(np.float32)  # 1.08 MB
    checksums, sizes = {"params/kernel": zlib.crc32(kernel)}, []
    for iteration, scale in enumerate((1, 2)):
        states = state() | {"params": {"kernel": jnp.asarray(kernel * scale), "bias": jnp.zeros((3, 2))}}
        with Checkpoints(tmp_path, DESCRIPTION, given=checksums) as checkpoints:
            checkpoints.save(initial_progress(states, 3)._replace(iteration=iteration))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(iteration)).rglob("*") if path.is_file()))
        like, given = functools.partial(dict, states), {"params/kernel": kernel}
        assert bits(restored(tmp_path, like, given, checksums).states) == bits(states)
    assert sizes[0] < 1e5 and sizes[1] > 1e6
    with pytest.raises(ConfigError, match=r"frozen weights are not .* \(params/kernel, 1 in all\)"):
        restored(tmp_path, like, {"params/kernel": kernel + 1}, {"params/kernel": 1}, at_most=0)


def test_the_latest_are_kept(tmp_path):
    assert save(tmp_path, range(5)) == [3, 4] and KEPT == 2
    assert save(tmp_path, [5]) == [4, 5], "of those of an earlier process"


def test_buffers_may_be_donated_while_it_writes(tmp_path):
    states = state(4.0) | {"params": {"kernel": jnp.full((3, 512, 512), 4.0)}}
    with Checkpoints(tmp_path, DESCRIPTION) as checkpoints:
        checkpoints.save(initial_progress(states, 3)._replace(iteration=4))
        after = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(states["params"]["kernel"]).block_until_ready()
        assert states["params"]["kernel"].is_deleted() and (after == -1).all()
    found = restored(tmp_path, lambda: state() | {"params": {"kernel": jnp.zeros((3, 512, 512))}})
    assert (found.states["params"]["kernel"] == 4).all()


def damage(checkpoint, how):
    data = max((checkpoint / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    path = checkpoint / "run" / "metadata" if how == "half of the metadata" else data
    if how == "no data":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of arrays that are still being read
@pytest.mark.parametrize("how", ["half of the data", "no data", "half of the metadata"])
def test_a_damaged_one_is_refused_and_left_alone(how, tmp_path):
    save(tmp_path, [1, 2])
    damage(tmp_path / "2", how)
    with pytest.raises(ConfigError, match=rf"checkpoint {tmp_path / '2'} cannot be read \(.*remove it to go on from"):
        restored(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}
    shutil.rmtree(tmp_path / "2")
    assert bits(restored(tmp_path).states) == bits(progress(1).states)


def test_a_checkpoint_that_may_not_fit_is_not_begun(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"^a checkpoint cannot be written to .*run: .*Make room.*--resume\)$"):
        with Checkpoints(tmp_path / "run", DESCRIPTION) as checkpoints:
            checkpoints.save(progress(1))
            monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=2**20))
            checkpoints.save(progress(2))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]


def test_none_after_what_the_metrics_reach(tmp_path):
    save(tmp_path, [1, 4])
    assert restored(tmp_path, at_most=3).iteration == 1
    assert save(tmp_path, [4]) == [1, 4], "its number is free again"
    with pytest.raises(ConfigError, match="the metrics end before all checkpoints in .*another folder"):
        restored(tmp_path, at_most=0)


def test_a_save_that_was_not_finished_does_not_count(tmp_path):
    save(tmp_path, [1, 2])
    (tmp_path / "2" / "commit_success.txt").unlink(missing_ok=True)
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    assert restored(tmp_path).iteration == 1


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    """As a user who copies files may leave it; also an older one than the newest."""
    save(tmp_path / "a", [2])
    save(tmp_path / "b", [1], DESCRIPTION | {"keys": [1, 2]})
    (tmp_path / "b" / "1").rename(tmp_path / "a" / "1")
    assert restored(tmp_path / "a").iteration == 2
    with pytest.raises(ConfigError, match=r"keys is None here, and \[1, 2\] in the checkpoints"):
        restored(tmp_path / "a", at_most=1)


def test_what_differs_is_refused_by_its_name(tmp_path):
    save(tmp_path, [1])
    for config, message in (
        (DESCRIPTION["config"] | {"num_envs": 16}, "config.num_envs is 16 here, and 8 in the checkpoints"),
        (DESCRIPTION["config"] | {"algorithm": {"start": "x"}}, "config.algorithm.start is 'x' here"),
    ):
        with pytest.raises(ConfigError, match=message), Checkpoints(tmp_path, {"name": "a", "config": config}) as other:
            other.restore(jax.eval_shape(state))
    with pytest.raises(ConfigError, match=r"state.params/kernel is \[\[3, 5\], 'float32'\] here, and \[\[3, 2\]"):
        restored(tmp_path, lambda: state() | {"params": {"kernel": jnp.zeros((3, 5)), "bias": jnp.zeros(3)}})


@pytest.mark.slow
def test_a_coefficient_that_adapts_goes_on(tmp_path):
    algorithm = GRPO._replace(
        kl_controller=with_hyperparams(adaptive_coefficient, target="kl_target"),
        entropy_controller=with_hyperparams(adaptive_entropy_coefficient, target="entropy_target"),
        hyperparams=EntropyHyperparams,
    )
    sizes = {"num_envs": 4, "group_size": 2, "num_epochs": 2, "num_minibatches": 1, "network": MLP((4,))}
    config = Config(environment=Probe(), algorithm=algorithm, **sizes)
    hyperparams = Hyperparams(total_steps=6.0 * config.steps_per_iteration, kl_coef=0.1, entropy_coef=0.1)
    with Checkpoints(tmp_path, DESCRIPTION) as checkpoints:
        whole = run(config, hyperparams, KEYS[:2], callback=lambda now, _: checkpoints.save(now), chunk_length=2)
    with Checkpoints(tmp_path, DESCRIPTION) as checkpoints:
        like = jax.eval_shape(functools.partial(initial_states, config), hyperparams, KEYS[:2])
        start = checkpoints.restore(like, at_most=5)
    for name in ("kl_coef", "entropy_coef"):
        coefficients = whole.metrics[f"policy/{name}"]
        assert start.iteration == 4 and (getattr(start.states, name) == coefficients[3]).all()
        assert (np.diff([np.full(2, 0.1), *coefficients], axis=0) != 0).all(), "it adapts in every iteration"
    rest = run(config, hyperparams, KEYS[:2], resume_from=start, chunk_length=2)
    assert bits(rest.states) == bits(whole.states)
    assert bits(rest.metrics) == bits({name: values[4:] for name, values in whole.metrics.items()})


@pytest.mark.parametrize("name", ["[red]", "a\\b"])
def test_a_folder_that_is_a_pattern_is_refused_before_training(tmp_path, name):
    with pytest.raises(ConfigError, match="without brackets"):
        Checkpoints(tmp_path / name, DESCRIPTION)
    assert not (tmp_path / name).exists()
