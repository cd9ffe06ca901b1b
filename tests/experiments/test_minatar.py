"""The settings that methods are tried with, and how much of the returns values explain."""

import json

import numpy as np
import pytest

from experiments import minatar, values
from grpo_jax.errors import ConfigError


def test_each_method_is_tried_with_the_same_settings():
    tried = {label: minatar.trials(method) for label, method in minatar.METHODS.items()}
    settings = [(trial["gae_lambda"], trial["learning_rate"], trial["entropy_coef"]) for trial in minatar.TRIALS]
    assert len(set(settings)) == 8
    for label, methods in tried.items():
        assert [name for name, _ in methods] == [" ".join(map(str, trial)) for trial in settings]
        assert all(method.fields.keys() >= minatar.METHODS[label].fields.keys() for _, method in methods)
        assert [method.fields["gae_lambda"] for _, method in methods] == [trial[0] for trial in settings]


@pytest.mark.parametrize("other", [{"ablations": True}, {"entropy_coef": 0.05}])
def test_tuning_of_what_it_replaces_is_refused(other):
    with pytest.raises(ConfigError, match="one of them at a time"):
        minatar.main(minatar.Arguments(tuning=True, **other))


def test_one_entropy_coefficient_for_all_methods():
    own, same = (
        [
            float(minatar.make_game_plan(arguments, "Breakout", label, method).hyperparams.entropy_coef)
            for label, method in minatar.METHODS.items()
        ]
        for arguments in (minatar.Arguments(), minatar.Arguments(entropy_coef=0.05))
    )
    assert len(set(own)) > 1 and set(same) == {0.05}


def test_numbers_of_policies_and_rollouts_are_checked():
    for wrong in ({"num_seeds": 0}, {"before": ()}, {"before": (0, 5)}):
        with pytest.raises(ConfigError, match="at least 1"):
            values.main(values.Arguments(**wrong))


def test_a_single_policy_has_no_standard_error():
    assert values.mean_and_error(np.array([0.25])) == "0.250"
    assert values.mean_and_error(np.array([0.2, 0.4])) == "0.300 ± 0.100"


@pytest.mark.slow
def test_values_explain_a_part_of_the_returns(tmp_path):
    out = tmp_path / "values.json"
    values.main(values.Arguments(games=("Breakout",), total_steps=20_000, before=(1,), num_seeds=1, out=out))
    explained = json.loads(out.read_text())["explained_variance"]["Breakout"]
    critic, features, board, earlier = (explained[label][0] for label in values.labels(values.Arguments(before=(1,))))
    assert max(critic, features, board, earlier) < 1
    assert min(board, earlier) > 0.1, "the board tells much of the value even under a policy that hardly plays"
