"""Compiled functions against the same ones as they are."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from launching import HELPERS
from problems import problem, rank_raw

from distap.ranking import compiled


@pytest.fixture
def compiling(monkeypatch):
    """Compile whatever the size of the batch."""
    monkeypatch.setattr(compiled, "PAYS_FROM_PAIRS", 0)
    monkeypatch.delenv("CXX", raising=False)
    caches = (compiled._choice, compiled._can_compile, compiled._say_once)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ap_q", "smooth_ap", "sup_ap"])
def test_compiled_gives_what_uncompiled_gives(name, compiling, monkeypatch, caplog):
    raw, labels = problem(0, 300, 40, dimensions=16, dtype=torch.float32)
    monkeypatch.setattr("distap.ranking.loss.CPU_TILE_PAIRS", 20_000)
    with caplog.at_level(logging.INFO), monkeypatch.context() as context:
        ranking, gradient = rank_raw(raw, labels, name)
        rank_raw(raw, labels, name)
        context.setattr(compiled, "PAYS_FROM_PAIRS", 2**62)
        plain, expected = rank_raw(raw, labels, name)
    said = [record.message for record in caplog.records]
    assert said.count("ranking runs compiled") == 1
    assert len(set(said)) == len(said)
    assert ranking.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_without_a_compiler_the_same_functions_run_and_it_is_said_once(compiling, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    raw, labels = problem(1, 30, 5)
    with caplog.at_level(logging.INFO):
        ranking, _ = rank_raw(raw, labels, "ap_q")
        rank_raw(raw, labels, "ap_q")
    assert [record.message for record in caplog.records if "uncompiled" in record.message] == [
        "ranking runs uncompiled, several times slower: no C++ compiler (g++) was found"
    ]
    assert ranking.is_finite


def test_a_compiler_that_fails_is_not_asked_again(compiling, monkeypatch, caplog):
    asked = []

    def broken(function, dynamic):
        def call(*arguments):
            asked.append(function)
            raise RuntimeError("no headers\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    raw, labels = problem(2, 30, 5)
    for _ in range(2):
        ranking, _ = rank_raw(raw, labels, "smooth_ap")
    assert ranking.is_finite
    assert len(asked) == len(set(asked)) > 0
    assert caplog.text.count("sigmoid_counts runs uncompiled, since what was compiled failed: RuntimeError: no") == 1


# In a process of its own, without the checks of shapes that the tests put around every function.
COUNT_OF_GRAPHS = """
import torch._dynamo.utils
from problems import problem, rank_raw
from distap.ranking import budget, compiled
compiled.PAYS_FROM_PAIRS, budget.CPU_TILE_PAIRS = 0, 5000
for images in (150, 300, 301, 317):
    rank_raw(*problem(0, images, 40, dimensions=16, dtype=torch.float32), "ap_q")
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_one_graph_serves_tiles_of_all_sizes():
    environment = os.environ | {"PYTHONPATH": str(HELPERS)}
    done = subprocess.run([sys.executable, "-c", COUNT_OF_GRAPHS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Of counts, codes and slopes; and two more of counts, for positives in one column and for their mirror image.
    assert 3 <= int(done.stdout) <= 5


def test_what_compiles_once_and_fails_later_is_left_alone_from_then_on(compiling, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: only_for_one_row)
    chosen = compiled.compiled_if_large(quick, 1, torch.ones(1))
    for rows in (1, 2, 1):
        assert chosen(torch.ones(rows)).tolist() == [2.0] * rows


def only_for_one_row(values):
    if len(values) > 1:
        raise RuntimeError("recompilation failed")
    return values + 1


def test_a_small_batch_is_not_compiled_and_it_is_said_once(compiling, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "PAYS_FROM_PAIRS", 2**22)
    raw, labels = problem(3, 30, 5)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            rank_raw(raw, labels, "smooth_ap")
    assert caplog.text.count("compiling pays from 4,194,304 pairs a rank") == 1


def slow(values):
    torch.full((500, 500), 2.0) @ torch.full((500, 500), 2.0)
    return values + 1


def quick(values):
    return values + 1


def failing(values):
    raise RuntimeError("out of registers")


@pytest.mark.parametrize(
    ("kernel", "said"), [(quick, "slow is a kernel written by hand ("), (failing, "slow is compiled (")]
)
def test_a_kernel_is_used_where_it_is_faster_and_works(kernel, said, compiling, monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    with caplog.at_level(logging.INFO):
        chosen = compiled.compiled_if_large(slow, 1, torch.ones(1), kernel)
        for _ in range(2):
            assert chosen(torch.ones(3)).tolist() == [2.0] * 3
    assert caplog.text.count(said) == 1


CHECK_OF_KERNEL = """
import torch
from distap.ranking.histogram import loss as histogram
from distap.ranking.histogram import triton_kernels
for rows, columns, bins, low in ((5, 300, 20, -1.0), (7, 129, 25, 0.0), (2, 64, 2, -1.0), (3, 500, 100, -1.0)):
    similarities = 2 * torch.rand(rows, columns) - 1
    similarities[0, 3], similarities[1, 5] = -torch.inf, 1.0
    arguments = similarities, 1.0, (1 - low) / (bins - 1), bins
    got, expected = triton_kernels.soft_counts(*arguments), histogram.soft_counts(*arguments)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
"""


def test_the_kernel_of_counts_gives_what_the_plain_function_gives_in_tritons_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK_OF_KERNEL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
