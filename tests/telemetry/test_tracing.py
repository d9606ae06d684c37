import gzip
import json

import pytest
import torch
from torch.profiler import profile, record_function

from distap.telemetry.tracing import Tracer


@pytest.fixture
def tracer(tmp_path):
    return Tracer(tmp_path / "traces", rank=0)


def train(tracer, steps, agreed_in):
    """Steps as a trainer does them; `agreed_in` names the steps in which the ranks agree on a trace of the next."""
    for step in range(1, steps + 1):
        with record_function(f"step {step}"):
            torch.ones(2).sum()
        if step in agreed_in:
            tracer.agreed()
        tracer.step_done(step)
        with record_function(f"evaluation {step}"):
            torch.ones(2).sum()
        if step < steps:
            tracer.begin(step + 1)


def traced(tmp_path):
    """The steps and evaluations in each file, by its step."""
    found = {}
    for path in (tmp_path / "traces").glob("step-*"):
        with gzip.open(path, "rt") as file:
            trace = json.load(file)
        names = [event.get("name", "") for event in trace["traceEvents"]]
        step = int(path.name.partition(".")[0].removeprefix("step-"))
        assert trace["distap"] == {"rank": 0, "step": step}
        found[step] = {name for name in names if name.startswith(("step ", "evaluation "))}
    return found


def test_each_trace_has_one_step_and_no_evaluation(tmp_path, tracer):
    train(tracer, 8, agreed_in=[1, 2, 5])
    assert traced(tmp_path) == {2: {"step 2"}, 3: {"step 3"}, 6: {"step 6"}}


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_profiler_that_fails_costs_a_trace_and_not_the_training(tmp_path, tracer, monkeypatch, caplog, method):
    work = getattr(profile, method)

    def fail(self):
        if method == "stop":
            work(self)
        raise AssertionError("CUPTI is taken")

    with monkeypatch.context() as patch:
        patch.setattr(profile, method, fail)
        train(tracer, 4, agreed_in=[1])
    assert traced(tmp_path) == {} and "CUPTI is taken" in caplog.text
    train(tracer, 4, agreed_in=[3])
    assert traced(tmp_path) == {4: {"step 4"}}
