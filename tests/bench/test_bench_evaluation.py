import io
import json

import numpy as np
import pytest
from rich.console import Console

from distap.bench.evaluation import (
    Setting,
    agreement,
    as_json,
    gallery_table,
    labelled_set,
    measure,
    measure_gallery,
    table,
)
from distap.errors import DistapError


def shown(rich_table):
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(rich_table)
    return console.export_text()


def test_every_way_of_evaluating_agrees_on_what_it_shares():
    setting = Setting(600, 64, rounds=2, threads=2)
    figures = measure(setting)
    full, nearest, library = figures
    assert library.name == "pytorch-metric-learning"
    assert all(row.seconds > 0 and row.peak_bytes >= 0 for row in figures)
    assert 0.05 < full.figures["mAP"] < 0.95
    for row in (nearest, library):
        for name in set(row.figures) & set(full.figures):
            assert row.figures[name] == pytest.approx(full.figures[name], abs=1e-9)
    assert {"R@1", "mAP@R"} == set(library.figures)
    assert "…" not in shown(table(figures, setting))
    assert "apart. Times as fast as pytorch-metric-learning: " in agreement(figures)
    assert len(json.loads(as_json(figures))) == 3


def test_classes_have_the_sizes_of_products():
    _, labels = labelled_set(5000, 4)
    counts = np.bincount(labels.numpy())
    assert (counts[:-1].min(), counts.max()) == (2, 9)


def test_a_gallery_in_a_file_is_ranked_for_three_protocols():
    figures = measure_gallery(9000, 32, threads=2)
    assert 0 < figures.figures["Hard mAP"] < figures.figures["Easy mAP"] < 1
    assert figures.process_peak_bytes >= figures.peak_bytes
    assert "70 queries against 9,000" in shown(gallery_table(figures))
    assert json.loads(as_json(figures))["gallery"] == 9000
    with pytest.raises(DistapError, match="at least 5000"):
        measure_gallery(100, 32, threads=2)
