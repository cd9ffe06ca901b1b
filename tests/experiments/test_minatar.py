"""The settings that methods are tried with."""

import dataclasses

import pytest

from experiments import minatar
from grpo_jax.errors import ConfigError


def settings(methods):
    names = "gae_lambda", "learning_rate", "entropy_coef"
    return [tuple(method.fields.get(name) for name in names) for method in methods]


def test_each_method_is_tried_with_the_same_settings():
    tried = minatar.methods_of(minatar.Arguments(tuning=True))
    for label, method in minatar.METHODS.items():
        own = {name: each for name, each in tried.items() if name.startswith(label + ": ")}
        assert len(set(settings(own.values()))) == 8
        assert list(own) == [f"{label}: {' '.join(map(str, each))}" for each in settings(own.values())]
        assert all(each.fields.keys() >= method.fields.keys() for each in own.values())
        assert all(each.slots == method.slots for each in own.values())


def test_a_given_setting_is_that_of_all_methods_and_trials():
    given = minatar.Arguments(gae_lambda=0.9, entropy_coef=0.05)
    own, same = (settings(minatar.methods_of(arguments).values()) for arguments in (minatar.Arguments(), given))
    assert [rate for _, rate, _ in same] == [rate for _, rate, _ in own]
    assert {(trace, entropy) for trace, _, entropy in same} == {(0.9, 0.05)}
    tried = minatar.methods_of(dataclasses.replace(given, tuning=True, methods=("PPO",)))
    assert settings(tried.values()) == [(0.9, 2.5e-3, 0.05), (0.9, 5e-3, 0.05)]


@pytest.mark.parametrize("other", [{"tuning": True}, {"gae_lambda": 0.9}])
def test_another_lambda_for_ablations_is_refused(other):
    with pytest.raises(ConfigError, match="lambda of --ablations"):
        minatar.methods_of(minatar.Arguments(ablations=True, **other))
