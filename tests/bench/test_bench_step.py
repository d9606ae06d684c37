import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from distap.bench.arithmetic import forward_flops, graph_bytes
from distap.bench.contenders import SeededBatch, Task
from distap.bench.step import measure, possible_contenders
from distap.bench.step_results import Setting, as_json, results_from, table
from distap.distributed import World
from distap.engine import Precision
from distap.errors import DistapError
from distap.model import build_network
from distap.ranking import QuantizedAP

SETTING = Setting("resnet10t", image_size=32, batch=32, micro_batch=4, rounds=2, memory_batches=(16,))


@pytest.fixture(scope="module")
def results():
    return measure(SETTING)


@pytest.mark.slow
def test_every_contender_gives_the_parameters_the_same_gradient(results):
    errors = {row.contender: row.error for row in results.figures}
    assert results.exact == "full batch"
    assert errors.pop("floor, 2f + 1b") is errors.pop("floor, 1f + 1b") is None
    assert set(errors) == {"distap", "distap, graphs kept", "cached gradients", "full batch"}
    assert all(error < 1e-4 for error in errors.values())


@pytest.mark.slow
def test_all_take_turns_and_images_without_gradient_are_counted(results):
    assert all(len(row.seconds) == len(row.processor) == SETTING.rounds for row in results.figures)
    assert all(seconds > 0 for row in results.figures for seconds in (*row.seconds, *row.processor))
    two, one, *others = results.figures
    assert two.flops == pytest.approx(one.flops * 4 / 3)
    by_name = {row.contender: row for row in others}
    assert by_name["distap"].left_out == by_name["distap, graphs kept"].left_out == 0
    assert by_name["distap"].flops == by_name["cached gradients"].flops == two.flops
    assert by_name["distap, graphs kept"].flops == by_name["full batch"].flops == one.flops


@pytest.mark.slow
def test_distap_reduces_the_parameters_in_one_call_and_bytes_are_those_handed_over(results):
    network = build_network("resnet10t", {"name": "random"}, {"name": "gem"})
    parameters = 4 * sum(p.numel() for p in network.parameters())
    for row in results.figures:
        reduces = [call for call in row.collectives if call.reduces]
        if row.contender.startswith("floor"):
            assert not row.collectives
        elif row.contender.startswith("distap"):
            assert max(call.largest for call in reduces) == parameters
        else:
            assert sum(call.bytes for call in reduces) == parameters
            (gather,) = (call for call in row.collectives if call.name == "gloo:all_gather")
            share, dimensions = SETTING.batch // SETTING.ranks, results.descriptors // 4
            assert (gather.calls, gather.bytes) == (2, share * (4 * dimensions + 8))  # descriptors and labels


@pytest.mark.slow
def test_tables_fit_a_terminal_and_json_gives_the_results_back(results):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(results))
    printed = console.export_text()
    assert "…" not in printed
    assert "peak memory of a rank by B" in printed
    assert results_from(json.loads(as_json(results))) == results
    assert all(set(peaks) == {16, 32} for peaks in results.memory.values())


def test_a_batch_has_the_same_images_on_any_number_of_ranks():
    whole = SeededBatch(16, 32, 8, World())
    shares = [SeededBatch(16, 32, 8, World(rank, 2)) for rank in range(2)]
    for rank, share in enumerate(shares):
        assert torch.equal(share.pixels, whole.pixels[rank::2])
        assert torch.equal(share.labels, whole.labels[rank::2])
    assert whole.labels.unique().tolist() == [0, 1]


def test_operations_and_kept_bytes_of_a_convolution():
    network = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
    images = torch.zeros(2, 3, 16, 16)
    assert forward_flops(network, images) == 2 * 3 * 8 * 9 * 16 * 16
    assert graph_bytes(network, images) == 3 * 16 * 16 * 4


def test_what_memory_does_not_suffice_for_is_left_out_with_the_reason():
    network = build_network("resnet10t", {"name": "random"}, {"name": "gem"})
    task = Task(network, SeededBatch(16, 32, 8, World()), 4, QuantizedAP(), World(), Precision())
    chosen, omitted = possible_contenders(task, graph=1e15)
    assert [one.name for one in chosen] == ["floor, 2f + 1b", "floor, 1f + 1b", "distap", "cached gradients"]
    assert omitted.keys() == {"distap, graphs kept", "full batch"}
    assert omitted["full batch"].startswith("a rank's graph takes 16000000.0 GB")


@pytest.mark.parametrize("batch", [8, 20, 33])
def test_batches_that_cannot_be_compared_are_refused(batch):
    with pytest.raises(DistapError, match=f"a batch of {batch} images"):
        replace(SETTING, batch=batch)
