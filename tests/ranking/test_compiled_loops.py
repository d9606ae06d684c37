"""Compiled functions against the same functions as they are."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from launching import HELPERS
from problems import problem, rank_raw

from distap.ranking import compiling
from distap.ranking.losses.steps import StepSums, sigmoid_step


@pytest.fixture
def always(monkeypatch):
    """Compile whatever the size of the batch."""
    monkeypatch.setattr(compiling, "PAYS_FROM_PAIRS", 0)


def run(code, **environment):
    """Run code in a process of its own, without the checks of shapes that pytest puts around every
    function.
    """
    environment = os.environ | {"PYTHONPATH": str(HELPERS)} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ap_q", "smooth_ap", "sup_ap"])
def test_compiled_gives_what_uncompiled_gives(name, always, monkeypatch, caplog):
    raw, labels = problem(0, 300, 40, dimensions=256, dtype=torch.float32)
    # half of them reach few bins, not the first
    monkeypatch.setattr("distap.ranking.loss.CPU_TILE_PAIRS", 2_000)
    with caplog.at_level(logging.INFO):
        ranking, gradient = rank_raw(raw, labels, name)
        rank_raw(raw, labels, name)
        monkeypatch.setattr(compiling, "PAYS_FROM_PAIRS", 2**62)
        plain, expected = rank_raw(raw, labels, name)
    output = [record.message for record in caplog.records]
    assert "is compiled" in output[0]
    assert len(set(output)) == len(output)
    assert ranking.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


COUNT_OF_GRAPHS = """
import torch._dynamo.utils
from problems import problem, rank_raw
from distap.ranking import compiling, loss
compiling.PAYS_FROM_PAIRS, loss.CPU_TILE_PAIRS = 0, 5000
for images in (150, 300, 301, 317):
    rank_raw(*problem(0, images, 40, dimensions=16, dtype=torch.float32), "ap_q")
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_one_graph_serves_tiles_of_all_sizes():
    # Of counts, codes and slopes; and two more of counts, for positives in one column and for their
    # mirror image.
    assert 3 <= int(run(COUNT_OF_GRAPHS)) <= 5


WITHOUT_COMPILER = """
import logging, os, sys
logging.basicConfig(stream=sys.stdout)
from problems import problem, rank_raw
from distap.ranking import compiling
compiling.PAYS_FROM_PAIRS = 0
for _ in range(2):
    assert rank_raw(*problem(1, 30, 5), "ap_q")[0].is_finite
"""


@pytest.mark.slow
def test_without_a_compiler_the_same_functions_run_and_each_says_so_once():
    output = run(
        WITHOUT_COMPILER, PATH="", CXX="", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1"
    ).splitlines()
    warnings = [line for line in output if "failed when compiled" in line]
    assert len(warnings) == len(set(warnings)) == 3
    assert all("compiler" in line for line in warnings)


def test_a_small_batch_is_not_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)
    for name in ("ap_q", "smooth_ap"):
        assert rank_raw(*problem(3, 30, 5), name)[0].is_finite


# with the first, powers of far images overflow; the second has none
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_powers_of_two_give_what_a_sigmoid_of_each_difference_gives(spread):
    images = torch.linspace(-1, 1, 401)[None]
    positives = torch.tensor([[1 - 2 * spread, 1 - spread, 1.0]])
    images = torch.cat([images, torch.full((1, 1), -torch.inf)], dim=1)
    count, fall = StepSums(sigmoid_step, (0.005,), 0, images, positives).counts()
    element = torch.sigmoid((images.double() - positives.double().mT) / 0.005)
    torch.testing.assert_close(count[0].double(), element.sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        fall[0].double(), (element * (1 - element)).sum(1) / 0.005, rtol=1e-5, atol=0
    )
