"""A folder is data: what it names is not imported without trust, and damages are errors with the file and the field."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from probes import Probe, bits
from saved_policies import save_policies

import grpo_jax
from grpo_jax import GRPO, Config, Hyperparams
from grpo_jax.algorithms import ALGORITHMS, with_reference
from grpo_jax.baselines import boosted, lstd_baseline, observed, same_step_baseline
from grpo_jax.errors import ConfigError
from grpo_jax.objectives import tuned
from grpo_jax.policies import MLP
from grpo_jax.recording.config_file import FIELDS, config_fields, find_trusted, from_json, trusted_objects
from grpo_jax.recording.files import CHECKSUM, describe_kind, fits, with_checksum

SIZES = {"algorithm": "ppo", "num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": MLP((4,))}
CATCH = Config(environment="Catch-bsuite", normalize_observations=True, **SIZES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_policies(directory, CATCH)
    return directory


@pytest.fixture
def description(saved):
    """The path of policy.json, which is as it was after the test, and its contents without the checksum."""
    (path,) = saved.glob("policies/*/policy.json")
    text = path.read_text()
    contents = json.loads(text)
    del contents[CHECKSUM]
    yield path, contents
    path.write_text(text)


def rewrite(path, contents, **changes):
    path.write_text(json.dumps(with_checksum(contents | changes)))


# --- damages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value",
    [
        *[("num_rows", value) for value in ("two", None, 2.0, True, [2], 3, 1, 0, -2, 2**70)],
        *[("env_params", value) for value in ([], ["gravity"], "x", 3, {"gravity": 9.8}, {"nope": [1, 2]})],
        *[("hyperparams", value) for value in (3, [], {}, True)],
        *[("format", value) for value in (-5, 0, "1", None, 1.5, True, [1], {})],
        *[("config", value) for value in (None, [], "x", 3)],
        *[("not_in_config", value) for value in (None, "x", 3, {}, [3])],
        *[("name", value) for value in (None, 3, [])],
        *[("label", value) for value in (None, 3)],
        *[("versions", value) for value in (3, [1], {"jax": 3})],
    ],
    ids=repr,
)
def test_a_damaged_field_is_named_with_its_file(field, value, description, saved):
    path, contents = description
    rewrite(path, contents, **{field: value})
    with pytest.raises(ConfigError) as refused:
        grpo_jax.load(saved)
    assert str(path) in str(refused.value) or path.parent.name in str(refused.value)
    assert field in str(refused.value)


def mlp(**fields):
    """An MLP as a file of a config has it."""
    return {"name": "mlp", **fields}


@pytest.mark.parametrize(
    "field, value",
    [
        *[("num_envs", value) for value in ("4", None, 4.0, [4], True, 0, -4)],
        *[("network", mlp(hidden_sizes=value)) for value in (4, "4", ["4"], [4.5], [[4]], {}, [0])],
        *[("network", mlp(activation=value)) for value in (3, "nope", "__class__", "Module")],
        *[("env_params", value) for value in ([], "x", {"env_params": 1})],
        *[("network", value) for value in ([], 3, "nope", mlp(nope=1), {"name": "nope"}, {"name": []})],
        *[("network", {"name": "transformer", "width": width}) for width in ("x", 7)],
        *[("algorithm", value) for value in (3, [], "nope", {"import": 3}, {"class": "grpo_jax.algorithms:Algorithm"})],
        *[("environment", value) for value in (3, [], "nope", None, {"import": "optax:adam"})],
        *[("optimizer", value) for value in (3, "nope", {"partial": {"import": "optax:adam"}})],
        *[("schedule", value) for value in (3, "nope")],
        ("nope", 3),
    ],
    ids=repr,
)
def test_a_damaged_field_of_the_config_is_named_with_its_file(field, value, description, saved):
    path, contents = description
    rewrite(path, contents, config=contents["config"] | {field: value})
    with pytest.raises(ConfigError) as refused:
        grpo_jax.load(saved)
    assert str(path) in str(refused.value) and field in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", '{"format": 1}', "\x00", "[" * 3000, '"' + "a" * 20])
def test_a_file_without_a_description_is_named(text, description, saved):
    path, _ = description
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        grpo_jax.load(saved)


def test_a_missing_an_unknown_and_an_edited_field_are_named(description, saved):
    path, contents = description
    for field in ("num_rows", "config", "name"):
        rewrite(path, {name: value for name, value in contents.items() if name != field})
        with pytest.raises(ConfigError, match=f"{path} is damaged: it lacks {field}"):
            grpo_jax.load(saved)
    rewrite(path, contents, nmae="x")
    with pytest.raises(ConfigError, match="no field 'nmae': did you mean 'name'"):
        grpo_jax.load(saved)
    edited = contents | {"config": contents["config"] | {"num_epochs": 5}}
    path.write_text(json.dumps(edited | {CHECKSUM: with_checksum(contents)[CHECKSUM]}))
    with pytest.raises(ConfigError, match="its checksum .* if you changed it yourself, remove the field 'checksum'"):
        grpo_jax.load(saved)
    path.write_text(json.dumps(edited))
    assert grpo_jax.load(saved).config.num_epochs == 5, "also as versions without checksums wrote it"


def test_json_is_compared_with_types():
    assert fits([1, 2], list[int]) and fits([], tuple[int, ...]) and fits({"a": 1}, dict[str, float])
    assert fits(None, int | None) and fits(3, int | None) and fits({"a": []}, dict[str, object] | None) is False
    assert not fits(True, int) and not fits(1.0, int) and not fits([1, "a"], list[int]) and not fits("a", list[str])
    assert describe_kind(dict[str, list[int]] | None) == "an object of a list of a whole number or null"


# --- trust -----------------------------------------------------------------------------------------------------------

MODULE = """
import pathlib, dataclasses
from flax import struct
import grpo_jax, optax
from grpo_jax.environments import make_environment
pathlib.Path({marker!r}).write_text("this has run")

@struct.dataclass
class Mine(grpo_jax.Hyperparams):
    alpha: float = 0.5

def optimizer(hyperparams, learning_rate):
    return optax.adam(learning_rate)

def environment():
    from gymnax import make
    return make("Catch-bsuite")[0]

@dataclasses.dataclass(frozen=True)
class Schedule:
    slope: float
    def __call__(self, progress):
        return 1 - self.slope * progress
"""
OWN = {
    "optimizer": "evil_module:optimizer",
    "environment": "evil_module:environment",
    "schedule": {"class": "evil_module:Schedule", "fields": {"slope": 0.5}},
    "algorithm": {"partial": {"import": "evil_module:optimizer"}, "arguments": [], "options": {}},
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
def test_code_that_a_folder_names_runs_only_with_trust(field, module, description, saved):
    path, contents = description
    rewrite(path, contents, config=contents["config"] | {field: OWN[field]})
    with pytest.raises(ConfigError, match=f"{path}: {field} is 'evil_module:.*trust=True .--trust.; or pass the run's"):
        grpo_jax.load(saved)
    assert not module.exists() and "evil_module" not in sys.modules
    assert grpo_jax.load(saved, config=CATCH).config is CATCH and not module.exists()
    if field != "algorithm":
        config = grpo_jax.load(saved, trust=True).config
        assert module.exists() and getattr(config, field) != getattr(CATCH, field)


DANGEROUS = [
    *["os:system", "builtins:eval", "subprocess:run", "functools:partial", "importlib:import_module", "numpy:load"],
    *["jax:pure_callback", "jax.debug:callback", "jax.numpy:load", "jax.numpy:save", "jax.numpy:fromfile", "jax:jit"],
    *["jax.numpy:vectorize", "jax.numpy:frombuffer", "jax._src.numpy.lax_numpy:load", "flax.serialization:from_bytes"],
    *[
        "flax.linen:jit",
        "flax.linen:tabulate",
        "optax:jax",
        "jax.nn:jax",
        "optax._src.alias:base",
        "optax.contrib:muon",
    ],
    *["grpo_jax:load", "grpo_jax.importing:import_object", "grpo_jax.config:Config", "grpo_jax:recorded_run"],
    *["grpo_jax.environments.registry:make_environment", "grpo_jax.environments.suites.on_host:Gymnasium"],
    *["grpo_jax.environments.host:HostEnvironment", "grpo_jax.recording.files:write_json", "grpo_jax.types:TrainState"],
    *["grpo_jax.policies.distributions.factory:make_distribution", "grpo_jax.updates.optimizers:make_optimizer"],
    *["grpo_jax.updates.schedules:find_schedule", "grpo_jax.devices.processes:from_process_zero", "grpo_jax_cli:main"],
    *["grpo_jax.objectives.slots:inspect", "grpo_jax.objectives.slots:dataclasses", "grpo_jax.objectives.slots:Any"],
    *["grpo_jax.language:load_reward", "grpo_jax.commands.train:main", ":", "a:", ":a"],
]


@pytest.mark.parametrize("path", DANGEROUS)
def test_what_could_read_write_or_run_is_refused(path, tmp_path):
    partial = {"partial": {"import": path}, "arguments": ["x"], "options": {}}
    slot = {"class": "grpo_jax.objectives.slots:_Tuned", "fields": {"function": {"import": path}, "tunables": []}}
    for value in (path, {"import": path}, {"class": path, "fields": {}}, partial, slot):
        for field in ("schedule", "network", "optimizer", "action_distribution", "environment", "algorithm"):
            with pytest.raises(ConfigError, match=f"{field} is '.*': loading would import and run that code"):
                from_json(tmp_path, {field: value}, FIELDS, "Config")


def test_what_a_folder_may_name_is_pure():
    """None of the functions imports, calls the host, or touches files, by the names that their code uses."""
    allowed = trusted_objects()
    assert {path.partition(":")[0].partition(".")[0] for path in allowed} == {"grpo_jax", "jax", "flax", "optax"}
    ours = [each for path, each in allowed.items() if path.startswith("grpo_jax.") and hasattr(each, "__code__")]
    imports = {"import_object", "import_custom", "import_module", "__import__", "make_environment", "make_distribution"}
    forbidden = imports | {"open", "eval", "exec", "compile", "Path", "pure_callback", "io_callback", "callback"}
    assert len(ours) > 60 and [each for each in ours if forbidden & {*each.__code__.co_names}] == []


@pytest.mark.parametrize("name", ["gymnasium:os:Evil-v0", "gymnasium:evil_module:Evil-v0", "probes:Probe", "brax:a:b"])
def test_an_environment_that_imports_a_module_is_refused(name, module, tmp_path):
    with pytest.raises(ConfigError, match="environment is '.*': loading would import"):
        from_json(tmp_path, {"environment": name}, FIELDS, "Config")
    assert not module.exists()
    for known in ("gymnasium:CartPole-v1", "brax:ant", "tokens:sort-5", "CartPole-v1"):
        assert from_json(tmp_path, {"environment": known}, FIELDS, "Config") == {"environment": known}


def decay(power, progress):
    return jnp.power(1 - progress, power)


@pytest.mark.parametrize(
    "value",
    [
        *[each._replace(greedy_member=not each.greedy_member) for each in ALGORITHMS.values()],
        with_reference(GRPO),
        GRPO._replace(baseline=lstd_baseline(features=observed)),
        GRPO._replace(baseline=boosted(same_step_baseline(), lstd_baseline())),
        GRPO._replace(surrogate=tuned(jax.nn.relu)),
        GRPO._replace(critic=optax.huber_loss, reduce=functools.partial(jnp.power, 0.5)),
    ],
    ids=lambda value: type(value.advantage).__name__,
)
def test_variants_of_known_parts_need_no_trust(value, tmp_path):
    config = dataclasses.replace(CATCH)
    object.__setattr__(config, "algorithm", value)  # unchecked: some are for other environments
    fields, missing = config_fields(config)
    assert not missing and isinstance(fields["algorithm"], dict)
    found = from_json(tmp_path, json.loads(json.dumps(fields)), FIELDS, "Config")["algorithm"]
    assert found == value or repr(found) == repr(value)


def test_public_and_recorded_paths_lead_to_the_same():
    assert find_trusted("optax:adam", "f") is find_trusted("optax._src.alias:adam", "f") is optax.adam
    assert find_trusted("jax.nn:relu", "f") is jax.nn.relu and find_trusted("jax.numpy:cos", "f") is jnp.cos


# --- own hyperparameters and arrays of environments ------------------------------------------------------------------


def test_own_hyperparameters_are_kept_without_their_class(tmp_path, module):
    """As those of a class in a script or a notebook, which has no import path, or in a module that is not trusted."""
    own = struct.dataclass(type("Mine", (Hyperparams,), {"__annotations__": {"alpha": float}, "alpha": 0.5}))
    values = own(alpha=np.array([0.25, 0.75], np.float32), learning_rate=np.array([1.0, 2.0], np.float32))
    save_policies(tmp_path, CATCH, hyperparams=values)
    policies = grpo_jax.load(tmp_path, row="all", config=CATCH)
    assert policies.hyperparams.alpha.tolist() == [0.25, 0.75]
    assert policies.hyperparams.learning_rate.tolist() == [1.0, 2.0]
    assert isinstance(policies.hyperparams, Hyperparams)
    assert policies[1].hyperparams.replace(alpha=3.0).alpha == 3.0
    assert jax.eval_shape(policies[1].state, jax.random.key(0)).hyperparams.alpha.shape == ()
    again = grpo_jax.load(tmp_path, row="all", config=CATCH)
    assert jax.tree.structure(again) == jax.tree.structure(policies), "both are one class"
    (path,) = tmp_path.glob("policies/*/policy.json")
    contents = {name: value for name, value in json.loads(path.read_text()).items() if name != CHECKSUM}
    rewrite(path, contents, hyperparams="evil_module:Mine")
    assert grpo_jax.load(tmp_path).hyperparams.alpha == 0.75 and not module.exists()
    trusted = grpo_jax.load(tmp_path, trust=True).hyperparams
    assert type(trusted).__module__ == "evil_module" and trusted.alpha == 0.75
    assert type(grpo_jax.load(tmp_path).hyperparams) is type(trusted), "this process has the class by now"
    rewrite(path, contents, hyperparams="evil_module:optimizer")
    with pytest.raises(ConfigError, match="hyperparams is 'evil_module:optimizer', but must be a class"):
        grpo_jax.load(tmp_path, trust=True)


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


@pytest.mark.parametrize("kind", [tuple, list, np.array, jnp.array])
def test_arrays_are_parameters_of_environments(kind):
    weights = [[1.0, 2.0], [3.0, 4.0]]
    config = Config(environment=Goal(), env_params={"goal": kind([1.0, 2.0]), "weights": kind(weights)}, **SIZES)
    assert hash(config) and config == dataclasses.replace(config)
    assert dict(config.env_params) == {"goal": (1.0, 2.0), "weights": ((1.0, 2.0), (3.0, 4.0))}
    observation = config.env.reset(jax.random.key(0), config.env.params)[1]
    assert observation.tolist() == [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]


def make_goal():
    return Goal()


def test_a_policy_with_arrays_as_parameters_acts(tmp_path):
    given = {"goal": (1.0, 2.0), "weights": np.eye(2, dtype=np.float32)}
    config = Config(environment=f"{__name__}:make_goal", env_params=given, **SIZES)
    states = save_policies(tmp_path, config)
    policy = grpo_jax.load(tmp_path, row=0, trust=True)
    assert policy.config == config and bits(policy.params) == bits(jax.tree.map(lambda leaf: leaf[0], states.params))
    assert policy.act(np.zeros(6)) in (0, 1)


@pytest.mark.parametrize("value", [{"gravity": {}}, 3, {"gravity": (1.0, 2.0)}, {"gravity": "x"}, {"gravity": None}])
def test_what_is_no_parameter_is_refused(value):
    with pytest.raises(ConfigError, match="env_params=|gravity="):
        Config(environment="CartPole-v1", env_params=value, **SIZES)
