"""Environments on the host: pure functions of seed and actions, whatever the program does with their states."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import difference

from grpo_jax import GRPO, PPO, Config, Hyperparams, forked, make_mesh, run
from grpo_jax.environments import Discrete, HostEnvironment, make_environment
from grpo_jax.errors import ConfigError, HostError
from grpo_jax.host_calls import host_errors
from grpo_jax.policies import MLP
from grpo_jax.training.checks import check_mesh

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces
LIMIT = 6


class Walk(gymnasium.Env):
    """Left or right on a line, with noise in the observation; the right end pays 1.

    It writes every observation into one array, and pays an array.
    """

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.buffer = int(self.np_random.integers(-1, 2)), np.zeros(2, np.float32)
        return self.look(), {}

    def look(self):
        self.buffer[:] = self.place, self.np_random.normal()
        return self.buffer

    def step(self, action):
        assert action in (5, 6)
        self.place += 2 * action - 11
        return self.look(), np.array(float(self.place == 3)), abs(self.place) == 3, False, {}


def walk(**settings):
    """An environment, and the object behind it."""
    host = HostEnvironment(Walk, max_steps=LIMIT, **settings)
    return make_environment(host), host


@pytest.fixture(scope="module")
def step():
    """The jitted step of four environments that are fresh to each test."""
    env, host = walk()

    @jax.jit
    def step(states, actions):
        return jax.vmap(lambda state, action: env.step(None, state, action, {}))(states, actions)

    return env, host, step


def starts(env, num_envs=4):
    return jax.vmap(lambda key: env.reset(key, {}))(jax.random.split(jax.random.key(0), num_envs))


def test_episodes_are_those_of_gymnasium():
    env = make_environment("gymnasium:CartPole-v1")
    assert (env.name, env.max_steps, env.action_space) == ("gymnasium:CartPole-v1", 500, Discrete(2))
    states, first = starts(env)
    actions = jax.random.randint(jax.random.key(1), (60, 4), 0, 2)

    @jax.jit
    def play(states):
        def step(states, actions):
            moved = jax.vmap(lambda state, action: env.step(None, state, action, {}))(states, actions)
            return moved.state, moved

        return jax.lax.scan(step, states, actions)[1]

    first, actions, moved = jax.tree.map(np.asarray, (first, actions, play(states)))
    peer = gymnasium.make("CartPole-v1")
    for i in range(4):
        assert np.array_equal(first[i], peer.reset(seed=int(states.seed[i]))[0])
        ended = False
        for t in range(60):
            if not ended:
                observation, reward, ended = peer.step(actions[t, i])[:3]
                assert np.array_equal(moved.observation[t, i], observation)
                assert (moved.reward[t, i], moved.terminated[t, i]) == (reward, ended)
            else:
                assert not moved.reward[t, i], "after its end nothing happens"
        assert ended


def test_a_module_before_the_name_registers_it(tmp_path, monkeypatch):
    registers = f"import gymnasium\n\ngymnasium.register('Walk-v7', '{__name__}:Walk', max_episode_steps=9)\n"
    (tmp_path / "registers_walk.py").write_text(registers)
    monkeypatch.syspath_prepend(tmp_path)
    assert make_environment("gymnasium:registers_walk:Walk-v7").max_steps == 9


def test_copies_of_a_state_have_futures_of_their_own(step):
    env, host, step = step
    states = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], 4, axis=0), starts(env)[0])
    for actions in ([0, 0, 1, 1], [1, 1, 0, 1]):
        moved = step(states, jnp.array(actions))
        states = moved.state
    assert np.array_equal(moved.observation[0], moved.observation[1]), "the same actions"
    place = moved.observation[:, 0] - moved.observation[0, 0]
    assert place.tolist() == [0, 0, 0, 2] and host.episodes.num_steps < 8
    assert np.array_equal(moved.observation[0, 1], moved.observation[3, 1]), "the noise is that of the seed"
    copies = jax.tree.map(lambda leaf: jnp.repeat(leaf[3:], 4, axis=0), states)
    assert not difference(step(copies, jnp.zeros(4, int)), step(copies, jnp.zeros(4, int)))


@pytest.mark.parametrize("max_kept", [1024, 1])
def test_a_restored_state_goes_on_without_an_instance(step, max_kept):
    env, _, step = step
    other, other_host = walk(max_kept=max_kept)
    states, _ = starts(env)
    for t in range(LIMIT):
        if t == 2:
            restored = jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), states)
        actions = (jnp.arange(4) + t) % 2
        moved = step(states, actions)
        if t >= 2:
            again = jax.vmap(lambda state, action: other.step(None, state, action, {}))(restored, actions)
            assert not difference(again, moved)
            restored = again.state
        states = moved.state
    assert moved.state.ended.all() and other_host.episodes.num_replayed >= 8


class Unseeded(Walk):
    def look(self):
        return np.random.normal(size=2)


class Shows(Walk):
    """Observes the values that it is given, and returns what it is given at a step."""

    def __init__(self, space=Walk.observation_space, value=(0.0, 0.0), end=(0.0, False, False, {})):
        self.observation_space, self.value, self.end = space, value, end

    def look(self):
        return self.value

    def step(self, action):
        return self.value, *self.end


def own(**parts):
    """A function that makes a Walk, of which some parts are others."""
    return lambda: type("Own", (Walk,), parts)()


def walked(self, action):
    """A step, whose info has the legal actions: left, and right up to 0."""
    return *Walk.step(self, action)[:4], {"action_mask": np.int8([1, self.place <= 0])}


def started(self, **options):
    return Walk.reset(self, **options)[0], {"action_mask": np.int8([1, self.place <= 0])}


masked = own(action_masks=lambda self: [True, self.place <= 0])
drifting = own(step=lambda self, action: (Walk.step(self, action)[0], np.random.normal(), False, False, {}))


def bits(low, high, dtype):
    return spaces.Box(low, high, (2,), dtype)


the_same = Walk()
REFUSED = [
    (lambda: gymnasium.Wrapper(the_same), "gives a simulator again"),
    (lambda: Shows(bits(0, 2**40, np.int64), np.array([2**33 + 5, 7])), "has .*8589934597"),
    (lambda: Shows(bits(0, 255, np.uint8), np.array([0.7, 2])), "has .*0.7.* its type is uint8"),
    (lambda: Shows(bits(0, 9, np.int32), np.array([np.nan, 3])), "has .*nan"),
    (lambda: Shows(bits(-9, 9, np.float64), np.array([1e300, 0])), "has .*1e.?300"),
    (lambda: Shows(spaces.Dict(a=spaces.MultiBinary(2)), {"a": np.array([0.9, 0])}), "has .*0.9"),
    (lambda: Shows(spaces.Discrete(2), 2), r"has 2, which is not in Discrete\(2\)"),
    (lambda: Shows(spaces.Dict(a=spaces.MultiDiscrete([2, 3])), {"a": np.array([1, 3])}), r"has \[1 3\], which is not"),
    (lambda: Shows(value=None), "give numbers"),
    (lambda: Shows(value=np.zeros(3)), r"has float32\[3\] in place of float32\[2\]"),
    (lambda: Shows(spaces.Dict(a=spaces.Discrete(2)), {"b": 0}), "but another was given: Dict key mismatch"),
    (lambda: Shows(end=(0.0, False, {"k": 1})), "step returns 4 values; return the 5"),
    (lambda: Shows(end=(np.zeros(1), False, False, {})), r"what step gives has float32\[1\] in place of float32\[\]"),
    (Unseeded, r"differs when it is played again with the same 0 .*self\.np_random"),
    (lambda: Shows(end=(0.0, False, True, {})), "truncates an episode after 1 steps, before max_steps_in_episode=6"),
    (own(action_masks=lambda self: np.ones(3)), r"action_masks\(\) has bool\[3\] in place of bool\[2\]"),
    (own(action_masks=property(lambda self: np.ones(2, bool))), "action_masks is a value; write a method"),
    (own(action_masks=lambda self: None), r"action_masks\(\) is of type bool.* NoneType; give numbers"),
    (own(action_masks=lambda self: [False] * 2), "no legal action, but the episode goes on; terminate it"),
    (own(reset=started), r'info."action_mask".* NoneType; give'),
    (own(step=walked), r'step gives info."action_mask".*, but reset does not'),
    (lambda: Shows(end=2), "TypeError"),
    (lambda: with_actions(spaces.Tuple([spaces.Discrete(2)])), "in Tuple.* are not supported; use Discrete"),
    (lambda: with_actions(bits(0, 5, np.int32)), "in Box.* are not supported; use Discrete"),
    (lambda: Shows(spaces.Text(5), "abc"), "no fixed shape; use Box"),
]


def with_actions(space=Walk.action_space):
    made = Shows()
    made.action_space = space
    return made


def test_what_one_step_shows_is_refused_at_construction():
    for make, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            HostEnvironment(make, max_steps=LIMIT)


class Bare(gymnasium.Env):
    """Lacks its spaces."""


def test_what_is_no_environment_is_refused():
    for make, message in (
        (lambda: HostEnvironment(Walk()), r"Walk is one instance.*write HostEnvironment\(Walk, max_steps=30\), or"),
        (lambda: make_environment(the_same), r"write HostEnvironment\(Walk, max_steps=30\), or"),
        (lambda: make_environment(gymnasium.make("CartPole-v1")), "write environment='gymnasium:CartPole-v1', or"),
        (lambda: make_environment(Walk), r"max_steps_in_episode=0 of 'Walk' .*HostEnvironment\(Walk, max_steps=100\)"),
        (
            lambda: HostEnvironment(lambda: gymnasium.vector.SyncVectorEnv([Walk] * 2)),
            "is a vector of environments; give the class of one",
        ),
        (lambda: make_environment(Bare), "'Bare' has no observation_space and no action_space; set"),
        (lambda: make_environment("gymnasium:CartPol-v1"), "cannot make 'CartPol-v1': .*Did you mean: `CartPole"),
        (lambda: make_environment("gymnasium:nowhere:CartPole-v1"), "cannot make 'nowhere:Cart|No module .*'nowhere'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


class Failing(Walk):
    """Fails once it is broken."""

    is_broken = False

    def step(self, action):
        if self.is_broken:
            raise KeyError("no such place")
        return super().step(action)


def test_errors_on_the_host_are_readable(monkeypatch):
    env = make_environment(HostEnvironment(Failing, max_steps=LIMIT))
    monkeypatch.setattr(Failing, "is_broken", True)
    with pytest.raises(HostError, match=r"^environment 'Failing' on the host: KeyError: 'no such") as caught:
        with host_errors():
            jax.block_until_ready(env.step(None, env.reset(jax.random.key(0), {})[0], 0, {}))
    assert caught.value.__cause__.__traceback__.tb_frame.f_code is Failing.step.__code__, "the user's own frames"


@pytest.mark.parametrize("kind", [masked, lambda: gymnasium.Wrapper(masked()), own(reset=started, step=walked)])
def test_masks_of_both_conventions_are_those_of_each_state(kind):
    env = make_environment(HostEnvironment(kind, max_steps=LIMIT))
    states, _ = starts(env)
    moved = jax.vmap(lambda state: env.step(None, state, 0, {}))(states)
    for state, observation in ((states, starts(env)[1]), (moved.state, moved.observation)):
        assert env.action_mask(state, {}).tolist() == [[True, place <= 0] for place in observation[:, 0]]


def test_what_no_seed_determines_is_told_before_a_run():
    with pytest.warns(UserWarning, match="on the host: .* with the same 6 actions.* cannot be resumed"):
        HostEnvironment(drifting, max_steps=LIMIT)


def test_a_class_of_gymnasium_needs_no_host_environment_around_it():
    for environment in (Walk, f"{__name__}:Walk", f"{__name__}:with_actions"):
        made = make_environment(environment, {"max_steps_in_episode": 4})
        assert made.on_host and made.max_steps == 4


def config(algorithm, **settings):
    host = HostEnvironment(Walk, max_steps=LIMIT)
    return Config(environment=host, algorithm=algorithm, num_envs=16, network=MLP((8,)), num_minibatches=1, **settings)


def test_a_mesh_cannot_split_rows_and_their_environments():
    with pytest.raises(ConfigError, match=r"calls the host, but .* use make_mesh\(seeds=4\)"):
        check_mesh(config("ppo"), SimpleNamespace(size=4, shape={"seeds": 2, "envs": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["envs", "model"])
def test_a_mesh_may_split_those_of_one_row(axis):
    rows, small = jax.random.split(jax.random.key(0), 1), config("grpo")
    hyperparams = Hyperparams(total_steps=2 * small.steps_per_iteration)
    meshes = make_mesh(seeds=1, devices=jax.devices()[:1]), make_mesh(seeds=1, **{axis: 2})
    one, split = (run(small, hyperparams, rows, mesh=mesh).states for mesh in meshes)
    for leaf, other in zip(jax.tree.leaves(one.params), jax.tree.leaves(split.params), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, settings",
    [
        (PPO, {"num_steps": 32}),
        (PPO, {"num_steps": 32, "execution_plan": "gpu"}),
        (GRPO, {"group_size": 8}),
        (GRPO._replace(start=forked(2)), {"group_size": 4}),
    ],
    ids=["ppo", "ppo-gpu", "grpo", "forked"],
)
def test_rows_learn_and_a_resumed_run_is_the_uninterrupted_one(algorithm, settings):
    hyperparams = Hyperparams(learning_rate=0.02, total_steps=10_000.0)
    keys, halfway = jax.random.split(jax.random.key(0), 2), []

    def keep(progress, chunk):
        if len(halfway) < 3:
            halfway.append(progress._replace(states=jax.tree.map(jnp.copy, progress.states)))  # they are donated

    whole = run(config(algorithm, **settings), hyperparams, keys, callback=keep, chunk_length=5)
    means = np.asarray(whole.metrics["episode/return_mean"])
    assert np.nanmean(means[-5:]) > np.nanmean(means[:3]) + 0.2
    fresh = config(algorithm, **settings)
    resumed = run(fresh, hyperparams, keys, resume_from=halfway[-1], chunk_length=5)
    assert not difference(resumed.states.params, whole.states.params)
