"""What tells two configs apart when a run is resumed: functions and objects, not only their names."""

import functools
import json
import logging
import math
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from probes import Probe

from grpo_jax import PPO, Config, Hyperparams
from grpo_jax.environments.host import HostEnvironment
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.recording.checkpoint import Checkpoints, check_same_run
from grpo_jax.recording.identity import check_same, identity
from grpo_jax.recording.run_spec import RunSpec
from grpo_jax.training.progress import initial_progress

SIZES = {"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": MLP((4,))}


def as_read(value):
    """The description as it is read back from a checkpoint."""
    return json.loads(json.dumps(identity(value)))


def source(text):
    """What a module with this source defines last."""
    names = {"__name__": "users_module"}
    exec(compile(textwrap.dedent(text), "users_module.py", "exec"), names)
    return list(names.values())[-1]


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


REWARD = "def step_env(self, key, state, action, params):\n    return {} * action"
DIFFERENT = {
    "a schedule of optax": (
        *(optax.cosine_decay_schedule(1.0, 1, alpha=0.1), optax.cosine_decay_schedule(1.0, 1, alpha=0.2)),
        "closure.alpha is 0.2 here, and 0.1 in",
    ),
    "a lambda": (lambda mask: mask, lambda mask: mask * 2, "code.digest"),
    "a constant in a function in it": (
        *(source("def f(x):\n    return [y * 2 for y in x]"), source("def f(x):\n    return [y * 3 for y in x]")),
        "code.digest",
    ),
    "a default": (
        scaled,
        source("def scaled(mask, scale=1.0, *, power=2):\n    return scale * mask**power"),
        "code|def",
    ),
    "an argument of a partial": (functools.partial(scaled, scale=1.0), functools.partial(scaled, scale=2.0), "options"),
    "a number that it names": (
        source("C = 1\ndef f(x):\n  return C"),
        source("C = 2\ndef f(x):\n  return C"),
        "names.C",
    ),
    "a function that it calls": (
        source("def g(x):\n  return x\ndef f(x):\n  return g(x)"),
        source("def g(x):\n  return -x\ndef f(x):\n  return g(x)"),
        "names.g.code",
    ),
    "an array that it keeps": (with_state(jnp.zeros(3)), with_state(jnp.ones(3)), "closure.state is 'float32"),
    "a key that it keeps": (with_state(jax.random.key(0)), with_state(jax.random.key(1)), "closure.state"),
    "what is compiled": (jax.jit(lambda x: x), jax.jit(lambda x: -x), "code.digest"),
    "a field of an environment": (Paying(1.0), Paying(-1.0), "sign is -1.0 here, and 1.0 in"),
    "a method of an environment": (
        source(f"class Env:\n    {REWARD.format(1).replace(chr(10), chr(10) + '    ')}")(),
        source(f"class Env:\n    {REWARD.format(-1).replace(chr(10), chr(10) + '    ')}")(),
        "class.step_env.code",
    ),
    "a number of a class": (source("class Env:\n  sign = 0")(), source("class Env:\n  sign = 1")(), "class.sign is 1"),
    "a base class": (
        source("class Base:\n  sign = 1\nclass Env(Base):\n  pass")(),
        source("class Base:\n  sign = 2\nclass Env(Base):\n  pass")(),
        "base classes",
    ),
    "the object of a method": (Network(1.0).__call__, Network(2.0).__call__, "of.scale"),
    "a field of a network": (Network(1.0), Network(2.0), "scale is 2.0"),
    "a word in a long text": (with_state("a" * 2000), with_state("a" * 1999 + "b"), "closure.state"),
}


@pytest.mark.parametrize("one, other, field", DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_refused_by_its_name(one, other, field):
    assert check_same(as_read(one), as_read(one)) == []
    with pytest.raises(ConfigError, match=field):
        check_same(as_read(one), as_read(other))


def test_numbers_that_json_lacks_equal_themselves():
    for number in (math.nan, np.float32(np.nan), [math.nan], np.complex64(1j), np.bytes_(b"a")):
        assert check_same(as_read(with_state(number)), as_read(with_state(number))) == []
        with pytest.raises(ConfigError, match="closure.state"):
            check_same(as_read(with_state(number)), as_read(with_state(2.0)))


def test_comments_lines_and_docstrings_do_not_count():
    plain = source("def f(x):\n    return x + 1")
    commented = source('\n\ndef f(x):\n    """Adds."""\n    # one\n    return (\n        x + 1\n    )')
    assert as_read(plain) == as_read(commented)


def test_many_functions_that_use_each_other_are_described_once():
    """All paths through them would be 3^30."""
    lines = ["def f0(x): return x"]
    lines += [f"def f{i}(x): return f{i - 1}(f{i - 1}(x)) + (lambda y: f{max(i - 2, 0)}(y))(x)" for i in range(1, 31)]
    assert json.dumps(identity(source("\n".join(lines)))).count("digest") == 31


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


def test_what_cannot_be_compared_is_reported(tmp_path, caplog):
    def plan(state):
        reduce = with_state(state)
        config = Config(environment=Probe(), algorithm=PPO._replace(reduce=reduce), **SIZES)
        return RunSpec("ppo", config, Hyperparams(), jax.random.split(jax.random.key(0), 1)).describe()

    with Checkpoints(tmp_path, plan(threading.Lock()), every=1) as checkpoints:
        checkpoints.save(initial_progress({"params": jnp.ones((1, 4))}, 1))
    with caplog.at_level(logging.WARNING, "grpo_jax.recording.checkpoint"):
        check_same_run(tmp_path, plan(threading.Lock()))
    assert (
        "Whether config.algorithm.reduce.closure.state is what the run was started with cannot be told" in caplog.text
    )
    with pytest.raises(ConfigError, match="config.algorithm.reduce.closure.state is 0.5 here"):
        check_same_run(tmp_path, plan(0.5))


def test_code_of_another_python_is_reported_not_refused():
    here = as_read(lambda mask: mask)
    before = here | {"code": {"bytecode": "Python 3.10", "digest": "another"}}
    assert check_same(before, here, "config.schedule") == ["config.schedule.code"]


def test_an_import_path_is_what_it_leads_to(monkeypatch):
    def described():
        return RunSpec("ppo", config, Hyperparams(), jax.random.split(jax.random.key(0), 1)).describe()["config"]

    config = Config(environment="probes:Probe", **SIZES)
    before = described()
    assert before["environment"]["path"] == "probes:Probe" and "step_env" in before["environment"]
    monkeypatch.setattr(Probe, "get_obs", lambda self, state, params=None, key=None: state.mark)
    with pytest.raises(ConfigError, match="environment.get_obs"):
        check_same(before, described())


@pytest.mark.slow
def test_two_processes_agree():
    code = (
        "import json, test_identity as t\n"
        "print(json.dumps([t.identity(value) for case in t.DIFFERENT.values() for value in case[:2]]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == [as_read(value) for case in DIFFERENT.values() for value in case[:2]]
