"""Damaged folders: an error of one sentence, or a result, and nothing else."""

import json
import random
import shutil

import jax
import pytest
from language_models import make_model
from probes import bits
from saved_policies import edited, save_policies

import grpo_jax
from grpo_jax import Config
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model, load_params
from grpo_jax.policies import MLP
from grpo_jax.recording.checkpoint import Checkpoints
from grpo_jax.runs.progress import initial_progress

CATCH = Config("Catch-bsuite", "ppo", num_envs=2, num_steps=2, num_minibatches=1, network=MLP((2,)))
DESCRIPTION = {"name": "a", "config": {"num_envs": 8}}
STATE = {"kernel": jax.random.normal(jax.random.key(0), (3, 50, 50)), "key": jax.random.split(jax.random.key(1), 3)}
JUNK = (None, True, -1, 0, 3, 2**70, 1.5, 1e999, "", "x", "os:system", "\x00", [], [[]], [1, "a"], {}, {"a": {}})


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))]


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
    key, value = draw.choice([*value] if isinstance(value, dict) else range(len(value))), value.copy()
    if draw.random() < 0.2:
        found = value.pop(key)
        if isinstance(value, dict) and draw.random() < 0.5:
            value[key + "x"] = found
    else:
        value[key] = damaged_json(value[key], draw)
    return value


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with policies, and what `load` gives for it."""
    directory = tmp_path_factory.mktemp("run")
    save_policies(directory, CATCH)
    return directory, grpo_jax.load(directory, row="all")


@pytest.fixture
def folder(run):
    """The folder is as it was after a test."""
    files = {path: path.read_bytes() for path in run[0].rglob("*.npz")}
    yield run
    for path, content in files.items():
        path.write_bytes(content)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_policies_are_refused_or_the_same(seed, folder):
    directory, before = folder
    (path,) = directory.glob("policies/*/final.npz")
    path.write_bytes(damaged_bytes(path.read_bytes(), random.Random(seed)))
    try:
        after = grpo_jax.load(directory, row="all")
    except ConfigError as error:
        assert str(directory) in str(error) and "\n" not in str(error)[:300]
    else:
        assert after.config == before.config and bits(after) == bits(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_content_of_a_description_is_read_or_refused(seed, folder):
    directory, _ = folder
    (path,) = directory.glob("policies/*/final.npz")
    content, draw = path.read_bytes(), random.Random(seed)
    for _ in range(2):
        path.write_bytes(content)
        edited(path, lambda fields: damaged_json(fields, draw))
        try:
            policy = grpo_jax.load(directory)
            jax.eval_shape(policy.state, jax.random.key(0))
        except ConfigError as error:
            assert "\n" not in str(error)[:120]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(directory, DESCRIPTION) as saved:
        saved.save(initial_progress(STATE, 3)._replace(iteration=2))
    return directory


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_checkpoint_is_refused_or_read(seed, checkpoints, tmp_path):
    folder, draw = shutil.copytree(checkpoints, tmp_path / "copy"), random.Random(seed)
    path = draw.choice([path for path in sorted((folder / "2").rglob("*")) if path.is_file()])
    content = path.read_bytes()
    if path.name == "metadata" and path.parent.name == "run" and draw.random() < 0.5:
        path.write_text(json.dumps(damaged_json(json.loads(content), draw)))
    else:
        path.write_bytes(damaged_bytes(content, draw))
    try:
        with Checkpoints(folder, DESCRIPTION) as saved:
            found = saved.restore(jax.eval_shape(lambda: STATE))
    except ConfigError as error:
        assert "checkpoint" in str(error)
    else:
        assert found is None or bits(found.states) == bits(STATE)


def test_a_flipped_bit_of_a_checkpoint_is_found(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints, tmp_path / "copy")
    path = max((folder / "2" / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with Checkpoints(folder, DESCRIPTION) as saved, pytest.raises(ConfigError, match="kernel has changed since"):
        saved.restore(jax.eval_shape(lambda: STATE))


MODEL_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_model_is_refused_or_read(seed, model, tmp_path):
    """Its files have no checksums, so a change may be valid, but then the shapes are those of its config."""
    folder, draw = shutil.copytree(model, tmp_path / "model"), random.Random(seed)
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
            assert loaded.architecture.vocab_size == len(load_params(folder)["actor"]["embedding"])
        except ConfigError as error:
            assert str(error)
        path.write_bytes(content)
