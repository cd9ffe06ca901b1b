"""The site: every page is in its navigation, every public name in its reference, and the notebook is the tour."""

import importlib.util
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import grpo_jax
from grpo_jax import baselines, environments, language, objectives, policies, recording, rendering, sweeps
from grpo_jax.environments import tokens

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SITE = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
REFERENCE = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))


def pages(nav):
    """The paths of a navigation, depth first."""
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages(target)


def public_names(module):
    """The names that a module exports, or else those that it defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    definitions = re.findall(r"^(?:def |class )?(\w+)(?:\(|:| =)", inspect.getsource(module), flags=re.MULTILINE)
    return set(definitions)


def test_every_page_is_in_the_navigation():
    paths = [*REPOSITORY.glob("*.md"), *DOCS.glob("**/*.md"), *REPOSITORY.glob("experiments/results/*/README.md")]
    assert sorted(pages(SITE["nav"])) == sorted(str(path.relative_to(REPOSITORY)) for path in paths)


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


def test_every_animation_is_in_the_gallery():
    gallery = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert all(f"(gallery/{path.name})" in gallery for path in DOCS.glob("gallery/*.gif"))


def test_the_notebook_is_the_tour():
    spec = importlib.util.spec_from_file_location("notebook", DOCS / "site" / "notebook.py")
    spec.loader.exec_module(notebook := importlib.util.module_from_spec(spec))
    tour = notebook.cells((DOCS / "tour.md").read_text(encoding="utf-8"))
    cells = json.loads((DOCS / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    written = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert written == tour, "docs/site/notebook.py makes the notebook anew"
    first = next(text for kind, text in tour if kind == "code")
    assert first == "%pip install -q -e .", "a hosted notebook has no packages of ours"
