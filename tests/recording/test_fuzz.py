"""Damaged folders: an error of one sentence, or the same result as before, and nothing else."""

import json
import logging
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_models import make_model
from probes import bits
from saved_policies import save_policies

import grpo_jax
from grpo_jax import Config
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model, load_params
from grpo_jax.policies import MLP
from grpo_jax.recording.checkpoint import Checkpoints, check_same_run
from grpo_jax.recording.files import CHECKSUM
from grpo_jax.training.progress import initial_progress

CATCH = Config(
    environment="Catch-bsuite", algorithm="ppo", num_envs=2, num_steps=2, num_minibatches=1, network=MLP((2,))
)
DESCRIPTION = {"name": "a", "config": {"num_envs": 8}}
JUNK = (None, True, -1, 0, 3, 2**70, 1.5, 1e999, "", "x", "os:system", "\x00", [], [[]], [1, "a"], {}, {"a": {}})


def cases(few, many):
    """So many by default, and so many in the slow tests; each is a seed."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, many))]


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, removed, repeated, exchanged or cut off."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, to = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        match draw.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(data):
                data[at] = draw.randrange(256)
            case 2:
                del data[at : min(to, at + 9)]
            case 3:
                data[at:at] = data[at : min(to, at + 9)]
            case 4:
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 5:
                del data[at:]
    return bytes(data)


def damaged_json(value, draw: random.Random):
    """Another value, or one of its parts is removed, renamed or damaged."""
    if not value or not isinstance(value, dict | list) or draw.random() < 0.15:
        return draw.choice(JUNK)
    key = draw.choice([*value] if isinstance(value, dict) else range(len(value)))
    value = value.copy()
    if draw.random() < 0.2:
        found = value.pop(key)
        if isinstance(value, dict) and draw.random() < 0.5:
            value[key + "x"] = found
    else:
        value[key] = damaged_json(value[key], draw)
    return value


# --- policies --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """A folder with policies, and what `load` gives for it."""
    directory = tmp_path_factory.mktemp("policies")
    save_policies(directory, CATCH)
    return directory, grpo_jax.load(directory, row="all")


@pytest.fixture
def restored(policies):
    """The folder is as it was after a test."""
    files = {path: path.read_bytes() for path in policies[0].rglob("*.*") if path.is_file()}
    yield policies
    for path, content in files.items():
        path.write_bytes(content)


def check_loads_the_same(directory, before):
    try:
        after = grpo_jax.load(directory, row="all")
    except ConfigError as error:
        assert str(directory) in str(error) and "\n" not in str(error)[:300]
        return
    assert after.config == before.config and bits(after) == bits(before)


@pytest.mark.parametrize("seed", cases(4, 40))
@pytest.mark.parametrize("name", ["policy.json", "final.safetensors"])
def test_damaged_policies_are_refused_or_the_same(name, seed, restored):
    directory, before = restored
    (path,) = directory.glob(f"policies/*/{name}")
    content, draw = path.read_bytes(), random.Random(seed)
    if name == "final.safetensors":  # of which the header is least protected
        size = 8 + int.from_bytes(content[:8], "little")
        path.write_bytes(damaged_bytes(content[:size], draw) + content[size:])
    else:
        path.write_bytes(damaged_bytes(content, draw))
    check_loads_the_same(directory, before)


@pytest.mark.parametrize("seed", cases(5, 60))
def test_any_content_of_a_description_is_read_or_refused(seed, restored):
    directory, _ = restored
    (path,) = directory.glob("policies/*/policy.json")
    description = json.loads(path.read_text())
    del description[CHECKSUM]  # without which a change may be valid
    draw = random.Random(seed)
    for _ in range(2):
        path.write_text(json.dumps(damaged_json(description, draw)))
        try:
            policy = grpo_jax.load(directory)
            jax.eval_shape(policy.state, jax.random.key(0))
        except ConfigError as error:
            assert "\n" not in str(error)[:120]


@pytest.mark.parametrize("seed", cases(4, 60))
def test_headers_of_arrays_are_bounded_and_checked(seed, restored):
    directory, before = restored
    (path,) = directory.glob("policies/*/final.safetensors")
    content, draw = path.read_bytes(), random.Random(seed)
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    for _ in range(2):
        text = json.dumps(damaged_json(header, draw)).encode()
        claimed = draw.choice((len(text), len(text), len(text), 2**40, 2**63, 0, len(text) + 8))
        path.write_bytes(claimed.to_bytes(8, "little") + text + data)
        check_loads_the_same(directory, before)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def state(value=1.0):
    return {"kernel": jnp.full((3, 2), value), "key": jax.random.split(jax.random.key(int(value)), 3)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(directory, DESCRIPTION, every=1) as saved:
        for iteration in (1, 2):
            progress = initial_progress(state(float(iteration)), 3)
            saved.update(progress._replace(steps=np.full(3, iteration), iteration=iteration))
    return directory


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", cases(7, 50))
def test_a_damaged_checkpoint_is_skipped_refused_or_the_same(seed, checkpoints, tmp_path, caplog):
    folder, draw = shutil.copytree(checkpoints, tmp_path / "copy"), random.Random(seed)
    metadata = [path for path in sorted((folder / "2").rglob("*")) if path.is_file() and "/d/" not in str(path)]
    path = draw.choice(metadata)
    content = path.read_bytes()
    if path.name == "metadata" and path.parent.name == "run" and draw.random() < 0.5:
        path.write_text(json.dumps(damaged_json(json.loads(content), draw)))
    else:
        path.write_bytes(damaged_bytes(content, draw))
    with caplog.at_level(logging.WARNING):
        try:
            check_same_run(folder, DESCRIPTION)
            with Checkpoints(folder, DESCRIPTION, every=1) as saved:
                found = saved.restore(jax.eval_shape(state))
        except ConfigError as error:
            assert str(folder) in str(error)
            return
    assert found.iteration == 2 or "checkpoint of iteration 2 is damaged" in caplog.text
    assert bits(found.states) == bits(state(float(found.iteration))), path
    assert found.steps.tolist() == [found.iteration] * 3 and not found.stopped.any() and found.seconds == 0


# --- language models -------------------------------------------------------------------------------------------------


MODEL_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    return folder, bits(load_params(folder))


@pytest.mark.parametrize("seed", cases(6, 50))
def test_a_damaged_model_is_refused_or_read(seed, model, tmp_path):
    """Its files have no checksums, so a change may be valid, but then the shapes are those of its config."""
    folder, draw = shutil.copytree(model[0], tmp_path / "model"), random.Random(seed)
    for _ in range(3):
        path = folder / draw.choice(MODEL_FILES)
        content = path.read_bytes()
        if path.suffix == ".json" and draw.random() < 0.7:
            path.write_text(json.dumps(damaged_json(json.loads(content), draw)))
        else:
            path.write_bytes(damaged_bytes(content[:4000], draw) + content[4000:])
        try:
            loaded = load_model(folder)
            for prompt in ("2 + 3", [{"role": "user", "content": "2 + 3"}]):
                loaded.tokenizer.encode(prompt)
            assert loaded.vocab_size == len(load_params(folder)["actor"]["embedding"])
        except ConfigError as error:
            assert str(error)
        Path(path).write_bytes(content)
