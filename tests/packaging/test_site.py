"""The site, built as CI needs it: the reference has every public name with its text."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_jax
from grpo_jax import baselines, environments, language, objectives, policies, rendering, sweeps
from grpo_jax.environments import tokens

PACKAGES = grpo_jax, baselines, environments, language, objectives, policies, rendering, sweeps, tokens


@pytest.mark.slow
def test_the_reference_has_every_public_name_with_its_text(tmp_path):
    """In the built HTML, as the pages' sources do not show what is left out of them."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=Path(__file__).parents[2], check=True)
    described = {}
    for page in (tmp_path / "docs" / "reference").glob("*.html"):
        _, *parts = re.split(r'<h\d id="(grpo_jax[\w.]*)"', page.read_text())
        assert parts, f"{page.name} is empty"
        for path, html in zip(parts[::2], parts[1::2], strict=True):
            described[path] = "<p>" in html.partition('class="doc doc-contents')[2]
    for package in PACKAGES:
        for name in {*package.__all__} - {"__version__"}:
            found = [path for path in described if path.startswith(package.__name__) and path.endswith(f".{name}")]
            is_module = inspect.ismodule(getattr(package, name))
            assert is_module or any(described[path] for path in found), f"{package.__name__}.{name} is not described"
