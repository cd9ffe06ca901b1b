"""What `grpo-jax list` and `grpo-jax docs` print."""

import importlib.metadata

import pytest

from grpo_jax import Hyperparams
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.commands import docs
from grpo_jax.commands import list as listing
from grpo_jax.errors import ConfigError


@pytest.mark.parametrize(
    "what, words",
    [
        ("environments", ["CartPole-v1", "brax:NAME", "tokens:NAME", "package.module:Name"]),
        ("networks", ["auto", "cnn for images", "transformer"]),
        ("hyperparameters", ["learning_rate", "clip_high"]),
        ("algorithms", ["grpo", "2402.03300"]),
    ],
)
def test_a_list_has_a_line_for_each_name(what, words, capsys):
    listing.main(listing.Arguments(what))
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert max(map(len, printed.splitlines())) <= 80
    named = {"algorithms": ALGORITHMS, "hyperparameters": Hyperparams.__dataclass_fields__}
    assert {*named.get(what, ())} <= {line.split()[0] for line in printed.splitlines()}


def test_pages_are_listed_and_printed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)  # as in a clone
    docs.main(docs.Arguments())
    assert "Sharp bits" in capsys.readouterr().out
    docs.main(docs.Arguments("Sharp-Bits.md"))
    text = docs.pages()["sharp_bits"].read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"{text}\n"
    with pytest.raises(ConfigError, match="no page 'sharp_bit': did you mean 'sharp_bits'"):
        docs.main(docs.Arguments("sharp_bit"))
