"""What pages show of commands is so; what `grpo-jax list` and `grpo-jax docs` print."""

import contextlib
import importlib
import importlib.metadata
import io
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.commands import docs, lm
from grpo_jax.commands import list as listing
from grpo_jax.commands.harness import flags, parsing
from grpo_jax.errors import ConfigError
from grpo_jax.policies import Transformer

REPOSITORY = Path(__file__).parents[2]
PATTERNS = "README.md", "CONTRIBUTING.md", "docs/*.md", "experiments/results/*/README.md"
PAGES = [path for pattern in PATTERNS for path in REPOSITORY.glob(pattern)]
COMMAND = re.compile(r"(?:grpo-jax|python -m(?= experiments)) ((?:experiments\.)?[a-z][\w-]*)((?: [^`|]*)?)")
RUN = {name for part in (Config, Hyperparams, Transformer) for name in part.__dataclass_fields__}


def documented():
    """The page, name and flags of each command in a block of code, or between backticks."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        code = [line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
        code += re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for line in code:
            if (match := COMMAND.search(re.split(" # |  #|;", line.replace("\n", " "))[0])) and "..." not in match[2]:
                yield path.name, match[1].replace("-", "_"), shlex.split(match[2])


def unknown(name, flags):
    """What is wrong with the flags of a command; None if nothing is but that others are needed."""
    module = importlib.import_module(name if name.startswith("experiments.") else f"grpo_jax.commands.{name}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if name in ("sweep", "experiments.reasoning"):
                others = parsing.parse_known_flags(module.Arguments, flags)[1]
                known = RUN if name == "sweep" else parsing.flag_names(lm.Arguments)
                return {word for word in others if word.startswith("--") and word[2:].replace("-", "_") not in known}
            module.parse(module.Arguments, flags) if name == "train" else parsing.parse_flags(module.Arguments, flags)
    except (ConfigError, SystemExit) as error:
        is_short = re.search("Required options|Missing argument", said.getvalue()) and "Unrec" not in said.getvalue()
        return None if is_short else (error, said.getvalue())


def test_documented_commands_have_their_flags(monkeypatch):
    # Which would import suites and models.
    monkeypatch.setattr(parsing, "_construct", lambda *_: SimpleNamespace(config=None, hyperparams=None))
    monkeypatch.setattr(flags, "without_unread", lambda *_: Hyperparams())
    commands = [(page, name, words) for page, name, words in documented() if "--help" not in words]
    wrong = [(page, name, words, what) for page, name, words in commands if (what := unknown(name, words))]
    assert len(commands) > 60 and not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    "what, words",
    [
        ("environments", ["CartPole-v1", "brax:NAME", "tokens:NAME", "package.module:Name"]),
        ("networks", ["auto", "cnn for images", "transformer"]),
        ("hyperparameters", ["learning_rate", "clip_high"]),
        ("algorithms", ["grpo", "2402.03300"]),
        ("", ["grpo-jax list hyperparameters"]),
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
    docs.main(docs.Arguments("GAE"))
    assert re.search(r"\ncoming_from +CleanRL\n", capsys.readouterr().out)
    with pytest.raises(ConfigError, match="no page 'sharp_bit': did you mean 'sharp_bits'"):
        docs.main(docs.Arguments("sharp_bit"))
