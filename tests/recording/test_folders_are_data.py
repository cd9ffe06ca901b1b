"""A folder is data: what it names is not imported without trust, and damages are errors with the file and the field."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from probes import Probe, bits
from saved_policies import edited, save_policies

import grpo_jax
from grpo_jax import GRPO, PPO, Config, Hyperparams
from grpo_jax.algorithms import ALGORITHMS, with_reference
from grpo_jax.errors import ConfigError
from grpo_jax.groups import FRESH
from grpo_jax.policies import MLP
from grpo_jax.recording.config_file import FIELDS, config_fields, formulas, from_json
from grpo_jax.recording.files import describe_kind, fits

SIZES = {"algorithm": "ppo", "num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": MLP((4,))}
CATCH = Config(environment="Catch-bsuite", normalize_observations=True, **SIZES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_policies(directory, CATCH)
    return directory


@pytest.fixture
def file(saved):
    """The file of the final policies, which is as it was after the test."""
    (path,) = saved.glob("policies/*/final.npz")
    content = path.read_bytes()
    yield path
    path.write_bytes(content)


# --- damages ---------------------------------------------------------------------------------------------------------


def mlp(**fields):
    """An MLP as a file of a config has it."""
    return {"name": "mlp", **fields}


FIELDS_OF_FILE = [
    *[("num_rows", "two"), ("num_rows", 3), ("env_params", []), ("env_params", {"nope": [1, 2]}), ("format", None)],
    *[("config", []), ("not_in_config", "x"), ("versions", {"jax": 3}), ("num_row", 2)],
]
FIELDS_OF_CONFIG = [
    *[("num_envs", value) for value in ("4", True, 0)],
    *[("network", value) for value in ([], mlp(hidden_sizes=[4.5]), mlp(nope=1), {"name": "nope"}, {"name": []})],
    *[("network", {"name": "transformer", "width": 7}), ("environment", "nope"), ("environment", {"import": "a:b"})],
    *[("algorithm", value) for value in (3, "nope", {"name": "ppo", "nope": 1}, {"ratio": 3})],
    *[("algorithm", {"name": "ppo", "ratio": value}) for value in ({"of": 3}, {"of": "nope"}, [["x"]])],
    *[("schedule", "nope"), ("env_params", "x"), ("nope", 3), ("execution_plan", {"value_passes": "x"})],
]


@pytest.mark.parametrize(
    "part, field, value",
    [*(("file", *pair) for pair in FIELDS_OF_FILE), *(("config", *pair) for pair in FIELDS_OF_CONFIG)],
    ids=repr,
)
def test_a_damaged_field_is_named_with_its_file(part, field, value, file, saved):
    def damage(fields):
        return fields | ({field: value} if part == "file" else {"config": fields["config"] | {field: value}})

    edited(file, damage)
    with pytest.raises(ConfigError) as refused:
        grpo_jax.load(saved)
    assert str(file) in str(refused.value) and field in str(refused.value)


def test_a_missing_field_is_named(file, saved):
    edited(file, lambda fields: {name: value for name, value in fields.items() if name != "config"})
    with pytest.raises(ConfigError, match=f"{file} is damaged: it lacks config"):
        grpo_jax.load(saved)


def test_json_is_compared_with_types():
    assert fits([1, 2], list[int]) and fits([], tuple[int, ...]) and fits({"a": 1}, dict[str, float])
    assert fits(None, int | None) and fits(3, int | None) and fits({"a": []}, dict[str, object] | None) is False
    assert not fits(True, int) and not fits(1.0, int) and not fits([1, "a"], list[int]) and not fits("a", list[str])
    assert describe_kind(dict[str, list[int]] | None) == "dict[str, list[int]] | None" and describe_kind(int) == "int"


# --- trust -----------------------------------------------------------------------------------------------------------

MODULE = """
import pathlib
import optax
pathlib.Path({marker!r}).write_text("this has run")

def optimizer(hyperparams, learning_rate):
    return optax.adam(learning_rate)

def environment():
    from gymnax import make
    return make("Catch-bsuite")[0]

def schedule(progress):
    return 1 - progress

def ratio(log_ratio, batch, hyperparams):
    return log_ratio
"""
OWN = {
    **{name: f"evil_module:{name}" for name in ("optimizer", "environment", "schedule")},
    "algorithm": {"name": "ppo", "ratio": "evil_module:ratio"},
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module on Python's path, which nothing has imported; the file that it writes when it is."""
    marker = tmp_path / "marker"
    (tmp_path / "evil_module.py").write_text(MODULE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)
    yield marker
    sys.modules.pop("evil_module", None)


@pytest.mark.parametrize("field", OWN)
def test_code_that_a_folder_names_runs_only_with_trust(field, module, file, saved):
    edited(file, lambda fields: fields | {"config": fields["config"] | {field: OWN[field]}})
    with pytest.raises(ConfigError, match=f"{file}: {field} is 'evil_module:.*config=...*trust=True .--trust."):
        grpo_jax.load(saved)
    assert not module.exists() and "evil_module" not in sys.modules
    assert grpo_jax.load(saved, config=CATCH).config is CATCH and not module.exists()
    config = grpo_jax.load(saved, trust=True).config
    assert module.exists() and getattr(config, field) != getattr(CATCH, field)


PATHS = ["os:system", "jax.numpy:load", "grpo_jax.groups:forked", "gymnasium:os:Evil-v0"]


@pytest.mark.parametrize("path", [*PATHS, ":", "brax:a:b"])
def test_import_paths_are_refused_and_names_are_not(path, tmp_path):
    for field in ("schedule", "network", "optimizer", "action_distribution", "environment", "algorithm"):
        for value in (path, {"name": "ppo", "penalties": [path]}) if field == "algorithm" else (path,):
            with pytest.raises(ConfigError, match=f"{field} is '.*': loading would import and run that code"):
                from_json(tmp_path, {field: value}, FIELDS, "Config")
    for known in ("gymnasium:CartPole-v1", "brax:ant", "tokens:sort-5", "CartPole-v1"):
        assert from_json(tmp_path, {"environment": known}, FIELDS, "Config") == {"environment": known}


def test_what_a_folder_may_name_is_pure():
    """None of the functions imports, calls the host, or touches files, by the names that their code uses."""
    ours = [each for each in formulas().values() if hasattr(each, "__code__")]
    imports = {"import_object", "import_custom", "import_module", "__import__", "make_environment", "make_distribution"}
    forbidden = imports | {"open", "eval", "exec", "compile", "Path", "pure_callback", "io_callback", "callback"}
    assert len(ours) > 40 and [each for each in ours if forbidden & {*each.__code__.co_names}] == []


def test_variants_of_known_algorithms_need_no_trust(tmp_path):
    config = dataclasses.replace(CATCH)
    variants = [each._replace(greedy_member=not each.greedy_member) for each in ALGORITHMS.values()]
    variants += [with_reference(GRPO)._replace(filter_overlong=True), with_reference(PPO._replace(start=FRESH))]
    variants += [GRPO._replace(critic=PPO.critic)]
    for value in variants:
        object.__setattr__(config, "algorithm", value)  # unchecked: some are for other environments
        fields, missing = config_fields(config)
        assert not missing and isinstance(fields["algorithm"], dict)
        assert from_json(tmp_path, json.loads(json.dumps(fields)), FIELDS, "Config")["algorithm"] == value
    config = dataclasses.replace(CATCH, execution_plan="cpu", env_params={"max_steps_in_episode": 9})
    fields = json.loads(json.dumps(config_fields(config)[0]))
    assert Config(**from_json(tmp_path, fields, FIELDS, "Config")) == config


# --- own hyperparameters and arrays of environments ------------------------------------------------------------------


def test_own_hyperparameters_are_kept_if_the_algorithm_names_them(tmp_path):
    own = struct.dataclass(type("Mine", (Hyperparams,), {"__annotations__": {"alpha": float}, "alpha": 0.5}))
    values = own(alpha=np.array([0.25, 0.75], np.float32), learning_rate=np.array([1.0, 2.0], np.float32))
    save_policies(tmp_path, CATCH, hyperparams=values)
    config = dataclasses.replace(CATCH, algorithm=PPO._replace(hyperparams=own))
    policies = grpo_jax.load(tmp_path, row="all", config=config)
    assert type(policies.hyperparams) is own and policies.hyperparams.alpha.tolist() == [0.25, 0.75]
    others = grpo_jax.load(tmp_path, row="all").hyperparams
    assert type(others) is Hyperparams and others.learning_rate.tolist() == [1.0, 2.0]


@struct.dataclass
class GoalParams:
    goal: tuple = (0.0, 0.0)
    weights: jax.Array = struct.field(default_factory=lambda: jnp.ones((2, 2)))
    max_steps_in_episode: int = 4


class Goal(Probe):
    """Observes the goal and the weights."""

    default_params = GoalParams()

    def reset_env(self, key, params):
        return self._observe(params), jnp.int32(0)

    def step_env(self, key, state, action, params):
        return self._observe(params), state + 1, 0.0, False, {}

    def is_truncated(self, state, params):
        return state >= params.max_steps_in_episode

    def _observe(self, params):
        return jnp.concatenate([jnp.array(params.goal), jnp.ravel(params.weights)])


def make_goal():
    return Goal()


def test_arrays_are_parameters_of_environments():
    for kind in (tuple, list, np.array, jnp.array):
        given = {"goal": kind([1.0, 2.0]), "weights": kind([[1.0, 2.0], [3.0, 4.0]])}
        config = Config(environment=Goal(), env_params=given, **SIZES)
        assert hash(config) and dict(config.env_params) == {"goal": (1.0, 2.0), "weights": ((1.0, 2.0), (3.0, 4.0))}
    assert config.env.reset(jax.random.key(0), config.env.params)[1].tolist() == [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]
    for value in ({"gravity": {}}, 3, {"gravity": "x"}):
        with pytest.raises(ConfigError, match="env_params=|gravity="):
            Config(environment="CartPole-v1", env_params=value, **SIZES)


def test_a_policy_with_arrays_as_parameters_acts(tmp_path):
    given = {"goal": (1.0, 2.0), "weights": np.eye(2, dtype=np.float32)}
    config = Config(environment=f"{__name__}:make_goal", env_params=given, **SIZES)
    states, policy = save_policies(tmp_path, config), grpo_jax.load(tmp_path, row=0, trust=True)
    assert policy.config == config and bits(policy.params) == bits(jax.tree.map(lambda leaf: leaf[0], states.params))
    assert policy.act(np.zeros(6)) in (0, 1)
