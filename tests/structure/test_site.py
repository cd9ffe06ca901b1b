"""The site can be built, and its reference has every public name."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import grpo_jax
from grpo_jax import baselines, environments, language, objectives, policies, recording, rendering, sweeps
from grpo_jax.environments import tokens

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
REFERENCE = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))


def public_names(module):
    """The names that a module exports, or else those that it defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    definitions = re.findall(r"^(?:def |class )?(\w+)(?:\(|:| =)", inspect.getsource(module), flags=re.MULTILINE)
    return set(definitions)


def test_the_site_can_be_configured():
    config = pytest.importorskip("mkdocs.config")  # of the extra `docs`
    assert config.load_config(str(REPOSITORY / "mkdocs.yml"), strict=True).site_name == "grpo_jax"


def test_the_reference_has_every_public_name():
    shown = {"__version__"}
    for path in re.findall(r"^::: (\S+)$", REFERENCE, flags=re.MULTILINE):
        value = pkgutil.resolve_name(path)
        shown |= {*path.split(".")} | (public_names(value) if inspect.ismodule(value) else set())
    packages = (grpo_jax, baselines, environments, language, objectives, policies, recording, rendering, sweeps, tokens)
    offenders = [f"{package.__name__}.{name}" for package in packages for name in {*package.__all__} - shown]
    assert not offenders, "\n".join(offenders)
