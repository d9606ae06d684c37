"""The tables and drawings of docs/results.md and docs/results/ are those of the trainings."""

import json
import re
from statistics import fmean, stdev

import pytest
from launching import ROOT

from benchmarks.study.grid import Grid
from benchmarks.study.results import Results, drawing, markdown, read_results
from docs.generated import on_page_markdown

STUDIES = sorted((ROOT / "docs" / "studies").glob("*.yaml"))


@pytest.fixture(scope="module")
def pages():
    files = [ROOT / "docs/results.md", *(ROOT / "docs/results").glob("*.md")]
    return "\n".join(on_page_markdown(file.read_text()) for file in files)


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_a_published_table_and_drawing_are_those_of_the_trainings(file, pages, tmp_path):
    grid = Grid(file, tmp_path)
    published = Results(grid, grid.study.seeds, read_results(file.with_suffix(".jsonl")))
    assert len(published.rows()) == len(grid.points)
    assert all(len(row.results) == grid.study.seeds for row in published.rows())
    assert markdown(published) in pages
    assert drawing(published) == file.with_suffix(".svg").read_text()


def test_the_table_of_approximations_is_that_of_its_figures():
    results = {}
    for line in (ROOT / "docs" / "studies" / "approximations.jsonl").read_text().splitlines():
        element = json.loads(line)
        if "method" in element:
            figures = results.setdefault(
                (
                    f"{element['loss']}, {element['network']}",
                    str(element["batch"]),
                    element["method"],
                ),
                [],
            )
            figures.append((element["cosine"], element["other"]))
    page = (ROOT / "docs/results/approximations.md").read_text()
    rows = re.findall(r"^\| (\w+, (?:start|trained)) \| (\d+) \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 9
    for name, batch, arguments in rows:
        cells = [cell.strip() for cell in arguments.split("|")]
        exact = fmean(other for _, other in results[name, batch, "exact"])
        for small, to_exact, to_another in (("32", *cells[:2]), ("256", *cells[2:])):
            if to_exact:
                cosines, remaining = zip(*results[name, batch, f"mean of B = {small}"], strict=True)
                shown = [
                    float(number) for number in re.findall(r"\d\.\d+", f"{to_exact} {to_another}")
                ]
                assert shown == pytest.approx(
                    [fmean(cosines), stdev(cosines), fmean(remaining), exact], abs=0.0051
                )
