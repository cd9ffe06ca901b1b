"""The speed of a model folder beside transformers; no time is asserted."""

import importlib.metadata
import importlib.util
import json

import pytest

from experiments import pretrained_speed
from grpo_jax.commands import tiny_language_model
from grpo_jax.errors import ConfigError


def test_transformers_must_be_installed_to_be_timed(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match="torch is not installed; .*--no-transformers"):
        pretrained_speed.peer_versions()


@pytest.mark.slow
def test_a_model_folder_is_timed(tmp_path):
    """Beside transformers where it is installed."""
    prompts, model, out = tmp_path / "prompts.jsonl", tmp_path / "model", tmp_path / "speed.json"
    prompts.write_text('{"prompt": "a b"}\n')
    tiny_language_model.main(tiny_language_model.Arguments(out=model, prompts=prompts, num_layers=1, width=32))
    peer = importlib.util.find_spec("transformers") is not None
    sizes = {"num_completions": (4,), "num_tokens": (2,), "dtypes": ("float32",), "group_size": 2, "prompt_length": 3}
    few = {"transformers": peer, "repeats": 1, "seconds": 0.0}
    pretrained_speed.main(pretrained_speed.Arguments(model=model, out=out, **sizes, **few))
    rows = json.loads(out.read_text())["speed"]
    assert [row["implementation"] for row in rows] == ["rollout", "train step", "transformers"][: 2 + peer]
    assert all(row["num_tokens"] == 2 and row["steps_per_second"] > 0 for row in rows)
