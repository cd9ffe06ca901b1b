"""The site has the layout of the repository, so the links between its pages are the same in both."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

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
    """Blocks that tests do not run are Python like the others; pictures lead to themselves in full size."""
    markdown = re.sub(r"^```python no-run$", "```python", markdown, flags=re.MULTILINE)
    return re.sub(r"^(!\[[^\]]*\]\(([^)]+)\))$", r"[\1](\2)", markdown, flags=re.MULTILINE)
