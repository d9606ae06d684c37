import io

import pytest
from rich.console import Console

from distap.bench.savings import NOTHING, Setting, measure, table


@pytest.fixture(scope="module")
def measured():
    setting = Setting("resnet10t", image_size=32, batch=16, micro_batch=8, rounds=1, compile=False)
    figures, omitted = measure(setting)
    return setting, {row.saving: row for row in figures}, omitted


def test_savings_that_change_nothing_but_time_leave_the_gradient_alone(measured):
    _, figures, omitted = measured
    assert omitted == {}
    for saving in (NOTHING, "describe folded", "without channels-last", "activations checkpointed"):
        assert figures[saving].error < 1e-3 and figures[saving].drift < 1e-5
    assert 1e-5 < figures["describe in bf16"].drift < 0.1
    assert 1e-3 < figures["describe in bf16"].error < 1


def test_checkpointed_activations_are_not_kept(measured):
    _, figures, _ = measured
    assert figures["activations checkpointed"].graph_bytes < 0.8 * figures[NOTHING].graph_bytes


def test_the_table_has_a_row_for_each_saving(measured):
    setting, figures, _ = measured
    console = Console(width=160, file=io.StringIO())
    console.print(table(setting, list(figures.values()), {"compiled": "no compiler"}))
    text = console.file.getvalue()
    assert all(saving in text for saving in figures)
    assert "compiled is left out: no compiler" in text
