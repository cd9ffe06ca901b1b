"""What is asked of envpool, and what becomes of its answers, with a stand-in that answers in another order."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from grpo_jax.environments.suites.on_host import MAX_RESETS, EnvPool, Pools
from grpo_jax.errors import ConfigError


class Pool:
    """Simulators whose images are filled with their seed plus the sum of their actions."""

    observation_space, action_space = spaces.Box(0, 255, (3, 8, 6), np.uint8), spaces.Discrete(9)
    spec = SimpleNamespace(config=SimpleNamespace(max_episode_steps=27_000))

    def __init__(self, seeds):
        self.values = np.array(seeds)

    def reset(self):
        return self._images(self.values), {}

    def send(self, actions, indices):
        self.values[indices] += actions
        self._sent = indices

    def recv(self, *, reset, return_info):
        assert not reset and return_info
        indices = self._sent[::-1]  # the last is ready first
        values = self.values[indices]
        return self._images(values), values / 10, values > 20, values > 30, {"env_id": indices}

    def _images(self, values):
        return np.broadcast_to(values[:, None, None, None], (len(values), 3, 8, 6)).astype(np.uint8)


@pytest.fixture
def made(monkeypatch):
    """The seeds of each pool that is made."""
    made = []

    def make_gymnasium(name, *, num_envs, seed, num_threads):
        assert num_envs == len(seed) >= num_threads >= 1
        made.append(seed)
        return Pool(seed)

    names = {"make_gymnasium": make_gymnasium, "list_all_envs": lambda: ["Pong-v5"]}
    monkeypatch.setitem(sys.modules, "envpool", SimpleNamespace(**names))
    return made


def test_each_simulator_gets_its_action_and_its_outcome(made):
    pools = Pools("Pong-v5")
    (first, third), (second, _) = (list(zip(*pools.begin(seeds), strict=True))[0] for seeds in ([1, 20], [5, 6]))
    outcomes = pools.step([first, second, third], [3, 4, 7])
    assert made == [[0], [1, 20], [5, 6]], "a pool for all that begin together"
    assert [outcome.observation.max() for outcome in outcomes] == [4, 9, 27]
    assert [outcome.reward for outcome in outcomes] == [0.4, 0.9, 2.7]
    assert [outcome.terminated for outcome in outcomes] == [False, False, True]
    assert not any(outcome.truncated for outcome in outcomes)
    (later,) = pools.step([third], [10])
    assert later.observation.min() == 37 and later.truncated


def test_channels_of_images_come_last(made):
    pools = Pools("Pong-v5")
    assert pools.observation_space.shape == (8, 6, 3) and pools.max_steps == 27_000
    ((_, observation),) = pools.begin([7])
    assert observation.shape == (8, 6, 3) and (observation == 7).all()


def test_few_simulators_are_kept_for_first_observations(made):
    seeds = list(range(MAX_RESETS + 2))
    observations = Pools("Pong-v5").first_observations(seeds)
    assert [observation[0, 0, 0] for observation in observations] == seeds
    assert [len(pool) for pool in made] == [1, MAX_RESETS, 2]


def test_a_misspelt_name_is_answered(made):
    with pytest.raises(ConfigError, match="envpool has no environment 'Pon-v5'.*Pong-v5"):
        EnvPool("Pon-v5")
