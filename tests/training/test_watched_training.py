"""What a person or a scheduler can ask of a training that runs: its health, and a trace of its next
step.
"""

import gzip
import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import free_ports
from small_trainings import recipe
from trainings import Run

from distap.errors import RESTART
from distap.processes.stopping import TRACE_SIGNAL
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World


def answers(url: str) -> int:
    """The status of an answer; 0 where there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code
    except OSError:
        return 0


def events_of(trace) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt") as file:
        return list(json.load(file)["traceEvents"])


@pytest.mark.slow
def test_a_running_training_is_asked_for_its_health_and_for_traces(tmp_path, training_shards):
    port = free_ports(2)
    run = Run(tmp_path, training_shards, steps=100_000, metrics={"port": port})
    traces = run.folder / "traces"
    urls = [f"http://127.0.0.1:{port + rank}" for rank in range(2)]
    with run.started(2) as job:
        job.wait_until(lambda: all(answers(f"{url}/healthz") == 200 for url in urls))
        job.wait_until(lambda: all(answers(f"{url}/readyz") == 200 for url in urls))
        job.wait_until(lambda: "the first step was done" in job.said)
        os.kill(job.process.pid, TRACE_SIGNAL)
        job.wait_until(lambda: len(list(traces.glob("step-*.rank-?.json.gz"))) == 2)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status() == RESTART
    for trace in traces.iterdir():
        names = {event.get("name") for event in events_of(trace)}
        assert {
            "data_wait",
            "describe",
            "gather",
            "rank",
            "replay",
            "optimizer",
            "aten::conv2d",
            "[memory]",
        } <= names
    assert len(re.findall(r"traced step \d+", job.said)) == 1


def traced(run, shards, **changes) -> Path:
    """The folder of traces of a training that was asked for one in its first step."""
    trainer = Trainer(prepare(recipe(run, shards, **changes), World()), World())
    step = trainer.step

    def asked(share, learning_rate):
        if share.step == 0:
            os.kill(os.getpid(), TRACE_SIGNAL)
        return step(share, learning_rate)

    trainer.step = asked
    trainer.train()
    return run / "traces"


def test_an_evaluation_between_the_request_and_the_traced_step_is_not_in_the_trace(
    tmp_path, training_shards
):
    evaluated = {"data__validation": str(training_shards[1]), "evaluation": {"every": 1}}
    counts = []
    for name, changes in (("with", evaluated), ("without", {})):
        [trace] = traced(tmp_path / name, training_shards, steps=2, **changes).iterdir()
        assert trace.name == "step-2.rank-0.json.gz"
        counts.append(sum(event.get("name") == "aten::conv2d" for event in events_of(trace)))
    assert counts[0] == counts[1] > 0


def test_a_trace_that_is_asked_for_in_the_last_step_is_not_begun(tmp_path, training_shards):
    assert not traced(tmp_path, training_shards, steps=1).exists()
    assert not torch.autograd._profiler_enabled()


def test_a_profiler_that_fails_costs_a_trace_and_not_the_training(
    tmp_path, training_shards, monkeypatch, caplog
):
    def fail(_):
        raise AssertionError("CUPTI is taken")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    assert not traced(tmp_path, training_shards, steps=2).exists()
    assert "CUPTI is taken" in caplog.text
