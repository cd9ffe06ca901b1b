"""The site has the layout of the repository, so the links between its pages are the same in both."""

import inspect
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

from grpo_jax import objectives
from grpo_jax.algorithms import PAPERS, SENTENCES

ROOT = Path(__file__).parents[2]
PARTS = ("*.md", "docs/**/*", "experiments/results/**/*")


def on_files(files, config):
    """The files of the site by their paths in the repository, beside those of the theme."""
    paths = sorted({path.relative_to(ROOT) for part in PARTS for path in ROOT.glob(part) if path.is_file()})
    ours = [
        File(str(path), str(ROOT), config.site_dir, config.use_directory_urls)
        for path in paths
        if "__pycache__" not in path.parts
    ]
    return Files([*ours, *(file for file in files if file.src_dir != config.docs_dir)])


def on_page_markdown(markdown, page, config, files):
    """Prints the algorithms; blocks that tests do not run are Python too; pictures lead to themselves in full size.

    Formulas in tables lead to the reference. A page beside which there are no others needs no list of them.
    """
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    markdown = markdown.replace("<!-- the table of algorithms -->", "\n".join(algorithms()))
    markdown = re.sub(r"^```python no-run$", "```python", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^\|.*", _with_links, markdown, flags=re.MULTILINE)
    return re.sub(r"^(!\[[^\]]*\]\(([^)]+)\))$", r"[\1](\2)", markdown, flags=re.MULTILINE)


def _with_links(row):
    return re.sub(r"(?<!\[)`(?:objectives\.)?(\w+)`", _as_link, row[0])


def _as_link(name):
    found = getattr(objectives, name[1], None)
    return f"[{name[0]}][{found.__module__}.{name[1]}]" if inspect.isfunction(found) else name[0]


def algorithms():
    """The lines of a table of the algorithms."""
    yield from ("| algorithm | what sets it apart | paper |", "|---|---|---|")
    for name, paper in PAPERS.items():
        yield f"| `{name}` | {SENTENCES[name]} | [{paper}](https://arxiv.org/abs/{paper}) |"
