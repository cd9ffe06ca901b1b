"""What tells two configs apart when a run is resumed: functions and objects, not only their names."""

import functools
import importlib
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from probes import Probe

from grpo_jax import Config
from grpo_jax.environments.host import HostEnvironment
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.recording.identity import check_same, identity
from grpo_jax.recording.run_folder import describe

SIZES = {"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": MLP((4,))}
NUMBERS = itertools.count()


def as_read(value):
    """The description as it is read back from a checkpoint."""
    return json.loads(json.dumps(identity(value)))


@pytest.fixture
def source(tmp_path, monkeypatch):
    """What a module of the user with this source defines last."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(text):
        name = f"users_module_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text)
        return list(vars(importlib.import_module(name)).values())[-1]

    return load


class Paying(Probe):
    """A probe with its reward as a field."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    @functools.cached_property
    def table(self):
        return np.arange(3)


@struct.dataclass
class Network:
    scale: float = 1.0

    def __call__(self, observation, distribution, critic):
        return self.scale


def scaled(mask, scale):
    return scale * mask


def with_state(state):
    return lambda mask: mask / mask.sum() if state is not None else mask


@pytest.mark.parametrize(
    "one, other, field",
    [
        (*(optax.cosine_decay_schedule(1.0, 1, alpha=alpha) for alpha in (0.1, 0.2)), "closure.alpha is 0.2 here"),
        (*(functools.partial(scaled, scale=scale) for scale in (1.0, 2.0)), "options.scale is 2.0"),
        (*(with_state(jnp.full(3, fill)) for fill in (0, 1)), r"closure.state is 'int32\[3\]"),
        (*(with_state(jax.random.key(seed)) for seed in (0, 1)), "closure.state"),
        (*(with_state(number) for number in (math.nan, 2.0)), "closure.state"),
        (*((lambda mask, scale=scale: mask * scale) for scale in (1.0, 2.0)), r"defaults is \[2.0\]"),
        (Paying(1.0), Paying(-1.0), "sign is -1.0 here, and 1.0 in"),
        (Network(1.0), Network(2.0), "scale is 2.0"),
        (Network(1.0).__call__, Network(2.0).__call__, "of.scale"),
    ],
)
def test_what_differs_is_refused_by_its_name(one, other, field):
    check_same(as_read(one), as_read(one))
    with pytest.raises(ConfigError, match=field):
        check_same(as_read(one), as_read(other), "field")
    with pytest.raises(ConfigError, match="another version of grpo_jax: their config differs in old;"):
        check_same({"config": {"old": 0}}, {"config": {}})


@pytest.mark.parametrize(
    "text, field",
    [
        ("def f(x):\n    return [y * {} for y in x]", "field"),
        ("f = lambda x: x * {}", "field"),
        ("def f(x, scale={}):\n    return x", "field"),
        ("import jax\nf = jax.jit(lambda x: x * {})", "field"),
        ("class Env:\n    sign = {}\nf = Env()", "field.class"),
        ("class A:\n    sign = {}\nclass Env(A):\n    pass\nf = Env()", "field.class"),
    ],
)
def test_another_source_is_refused(text, field, source):
    one, other = (as_read(source(text.format(number))) for number in (2, 3))
    documented = text.format(2).replace("):\n", "):\n    'A docstring.'\n")
    assert one == as_read(source(f"# changed\n\n{documented}  # a comment"))
    with pytest.raises(ConfigError, match=f"^{field} has another source here than in the checkpoints"):
        check_same(one, other, "field")


def test_what_an_object_computes_or_keeps_does_not_count():
    used = Paying(1.0)
    assert used.table.tolist() == [0, 1, 2]
    assert as_read(used) == as_read(Paying(1.0))

    class Simulator:
        observation_space = action_space = None

    host = HostEnvironment.__new__(HostEnvironment)
    host.name, host._make, host.default_params, host.episodes = "own", Simulator, None, {"kept": 1}
    before = as_read(host)
    host.episodes["kept"] = 2
    assert as_read(host) == before and before["identity"][1]["class"].endswith("Simulator")


def test_an_import_path_is_what_it_leads_to():
    config = Config(environment="probes:Probe", **SIZES)
    assert describe(config)["environment"] == {"path": "probes:Probe"} | identity(Probe)
