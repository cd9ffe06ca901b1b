"""Both ends of --scale: the page has the results of its summary."""

from pathlib import Path

from experiments import scale
from experiments.harness.summaries import read_results

PAGE = Path(scale.__file__).parent / "results" / "scale"


def test_the_page_has_the_results():
    page = (PAGE / "README.md").read_text()
    for name, entry in read_results(PAGE).items():
        cells = [name, *scale.cells(name, entry)]
        assert f"| {' | '.join(cells)} |" in page and entry["steps"] == scale.SUITE[name].steps
