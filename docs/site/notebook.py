"""Makes the notebook of a page, runs it and writes it with its output.

python docs/site/notebook.py                   # docs/tour.md to docs/tour.ipynb
python docs/site/notebook.py /tmp/tour.ipynb   # to another file: a check that it runs
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
INSTALL = """# In a clone, this cell installs it. Elsewhere, as on Colab, write where the package is.
PACKAGE = ""  # "git+" and the address of the repository, or the path of a wheel

import shutil
from pathlib import Path

clones = [folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "grpo_jax_cli.py").exists()]
package = PACKAGE or (f"-e {clones[0]}" if clones else "")
assert package, "write the address of the repository, or the path of a wheel, into PACKAGE"
jax_for_gpu = "jax[cuda12]" if shutil.which("nvidia-smi") else ""
%pip install -q {package} {jax_for_gpu}
for folder in ("runs/tour", "runs/rates"):  # of an earlier run of this notebook
    shutil.rmtree(folder, ignore_errors=True)"""


def cells(page: str) -> list[tuple[str, str]]:
    """The kind and the text of each cell: Python and `pip install`, by `INSTALL`, are code, all else is Markdown."""
    parts = re.split(r"^```(python|bash)\n(.*?)```\n", page, flags=re.MULTILINE | re.DOTALL)
    found = [("markdown", parts[0].strip())]
    for language, code, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        is_install = code.startswith("pip install")
        if language == "python" or is_install:
            found.append(("code", INSTALL if is_install else code.strip()))
        else:
            found.append(("markdown", f"```{language}\n{code}```"))
        found.append(("markdown", text.strip()))
    return [(kind, text) for kind, text in found if text]


def main(path: Path) -> None:
    """Runs the tour from top to bottom in a new kernel; an error in a cell ends it."""
    import nbformat.v4 as nbformat
    from nbclient import NotebookClient

    make = {"code": nbformat.new_code_cell, "markdown": nbformat.new_markdown_cell}
    tour = cells((DOCS / "tour.md").read_text(encoding="utf-8"))
    notebook = nbformat.new_notebook(cells=[make[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(tour)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(notebook, timeout=600, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.source == INSTALL:
            cell.outputs = []  # of this machine
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "tour.ipynb")
