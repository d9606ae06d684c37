"""docs/results.md: its tables and drawings are those that the committed trainings give."""

import pytest
from launching import ROOT

from distap.apps.study.grid import Grid
from distap.apps.study.results import Results, drawing, markdown, read_results

STUDIES = sorted((ROOT / "docs" / "studies").glob("*.yaml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_a_published_table_and_drawing_are_those_of_the_trainings(file, tmp_path):
    grid = Grid(file, tmp_path)
    published = Results(grid, grid.study.seeds, read_results(file.with_suffix(".jsonl")))
    assert len(published.rows()) == len(grid.points)
    assert all(len(row.results) == grid.study.seeds for row in published.rows())
    assert markdown(published) in (ROOT / "docs" / "results.md").read_text()
    assert drawing(published) == file.with_suffix(".svg").read_text()
