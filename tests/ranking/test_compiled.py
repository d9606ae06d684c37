"""Compiled functions against the same ones as they are."""

import logging

import pytest
import torch
from problems import problem, rank_raw

from distap.ranking import compiled


@pytest.fixture
def compiling(monkeypatch):
    """Compile whatever the size of the batch."""
    monkeypatch.setattr(compiled, "PAYS_FROM_PAIRS", 0)
    compiled._compiled.cache_clear()
    compiled._can_compile.cache_clear()
    yield
    compiled._compiled.cache_clear()
    compiled._can_compile.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ap_q", "smooth_ap", "sup_ap"])
def test_compiled_gives_what_uncompiled_gives(name, compiling, monkeypatch, caplog):
    raw, labels = problem(0, 300, 40, dimensions=16, dtype=torch.float32)
    monkeypatch.setattr("distap.ranking.budget.CPU_TILE_PAIRS", 20_000)
    with caplog.at_level(logging.INFO), monkeypatch.context() as context:
        ranking, gradient = rank_raw(raw, labels, name)
        rank_raw(raw, labels, name)
        context.setattr(compiled, "PAYS_FROM_PAIRS", 2**62)
        plain, expected = rank_raw(raw, labels, name)
    said = [record.message for record in caplog.records]
    assert any(message.endswith("is compiled") for message in said)
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
    assert "sigmoid_counts runs uncompiled: RuntimeError: no headers" in caplog.text
