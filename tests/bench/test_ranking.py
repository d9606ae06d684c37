import io
import json

import pytest
import torch
from problems import problem
from rich.console import Console
from torch.nn.functional import normalize

from distap.bench.materialised import materialised_loss
from distap.bench.ranking import measure, table, write_results
from distap.errors import DistapError
from distap.ranking import build_loss, rank

NAMES = ["ap_q", "ap_t", "fast_ap", "smooth_ap", "sup_ap", "calibration", "roadmap", "blackbox_ap"]


@pytest.mark.parametrize("name", NAMES)
def test_the_materialised_form_is_the_same_loss(name):
    raw, _ = problem(0, 24, 4)
    labels = torch.arange(24) % 5
    loss = build_loss(name)
    descriptors = normalize(raw).requires_grad_()
    value = materialised_loss(loss, descriptors, labels)
    value.backward()
    ranking = rank(descriptors, labels, loss)
    assert value.item() == pytest.approx(ranking.loss.item(), rel=1e-9)
    difference = descriptors.grad - ranking.gradient
    own = descriptors.detach()
    projected = difference - (difference * own).sum(1, keepdim=True) * own
    assert projected.norm() <= 1e-9 * ranking.gradient.norm()


@pytest.mark.slow
def test_a_row_for_each_loss_and_setting_as_table_json_and_page(tmp_path):
    settings = {"images_a_class": 4, "rounds": 1, "threads": 2, "budget": None, "materialised": 10**8}
    figures = [
        row
        for rows in measure(["ap_q", "smooth_ap"], [64, 600], [16], [1, 2], error_batch=64, **settings)
        for row in rows
    ]
    assert [(row.loss, row.batch, row.ranks) for row in figures] == [
        (loss, batch, ranks) for batch in (64, 600) for ranks in (1, 2) for loss in ("ap_q", "smooth_ap")
    ]
    assert all(row.seconds > 0 and row.dense_seconds > 0 for row in figures)
    # Measured where it fits into 100 MB, on one rank: Smooth-AP of 600 would take a gigabyte for its triples.
    assert [row.materialised_seconds is not None for row in figures] == [True, True, False, False] + [False] * 4
    assert [row.error is not None for row in figures] == [True] * 4 + [False] * 4
    assert all(row.error < 1e-5 for row in figures if row.error is not None)

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(figures))
    assert "…" not in console.export_text()
    page = write_results(tmp_path / "out", figures, "two <threads>")
    assert len(json.loads((tmp_path / "out" / "ranking.json").read_text())) == 8
    text = page.read_text()
    assert text.count('role="img"') == 4
    assert "two &lt;threads&gt;" in text


def test_an_unknown_loss_is_named_before_anything_is_measured():
    with pytest.raises(DistapError, match="did you mean smooth_ap"):
        next(
            measure(
                ["smoth_ap"],
                [64],
                [16],
                [1],
                images_a_class=4,
                rounds=1,
                threads=1,
                budget=None,
                materialised=0,
                error_batch=0,
            )
        )
