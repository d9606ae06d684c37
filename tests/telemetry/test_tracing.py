import gzip
import json

import pytest
import torch
from torch.profiler import profile, record_function

from distap.stopwatch import Stopwatch
from distap.telemetry.tracing import Tracer


@pytest.fixture
def tracer(tmp_path):
    return Tracer(tmp_path / "traces", rank=0)


def train(tracer, steps, asked, evaluated=()):
    """Steps as a trainer does them; `asked` has how many are to be traced, by the step in which that is agreed on."""
    for done in range(1, steps + 1):
        with record_function(f"step {done}"):
            torch.ones(2).sum()
        if done in asked:
            tracer.agreed(asked[done])
        tracer.step_done(done)
        if done in evaluated:
            tracer.interrupt(done)
            with record_function(f"evaluation {done}"):
                torch.ones(2).sum()
        if done < steps:
            tracer.begin(done)
    tracer.close(steps)
    tracer.finish()


def traced(tmp_path):
    """The steps and evaluations in each file, by its first step."""
    found = {}
    for path in (tmp_path / "traces").glob("step-*"):
        with gzip.open(path, "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        first = int(path.name.partition(".")[0].removeprefix("step-"))
        found[first] = {name for name in names if name.startswith(("step ", "evaluation "))}
    return found


def test_a_trace_that_is_asked_for_while_another_is_under_way_follows_it(tmp_path, tracer):
    train(tracer, 8, asked={1: 3, 2: 2})
    assert traced(tmp_path) == {2: {"step 2", "step 3", "step 4"}, 5: {"step 5", "step 6"}}


def test_an_evaluation_between_traced_steps_is_in_no_trace(tmp_path, tracer):
    train(tracer, 6, asked={1: 3}, evaluated=[3, 5])
    assert traced(tmp_path) == {2: {"step 2", "step 3"}, 4: {"step 4"}}


def test_an_evaluation_after_the_last_traced_step_asks_for_no_further_one(tmp_path, tracer):
    train(tracer, 4, asked={1: 1}, evaluated=[1, 2, 3])
    assert traced(tmp_path) == {2: {"step 2"}}


def test_a_trace_does_not_grow_with_the_micro_batches_of_a_step(tmp_path, tracer):
    stopwatch = Stopwatch()
    stopwatch.begins = tracer.stage_begins
    for done in (1, 2):
        for stage, parts in {"describe": 40, "replay": 100, "optimizer": 0}.items():
            with stopwatch.stage(stage):
                for part in range(1, parts + 1):
                    with stopwatch.stage("network", part_of_outer=True), record_function(f"{stage} {part}"):
                        torch.ones(2).sum()
        if done == 1:
            tracer.agreed(1)
            tracer.begin(done)
    tracer.close(2)
    tracer.finish()
    [path] = (tmp_path / "traces").glob("step-2.*")
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    assert trace["distap"] == {"rank": 0, "steps": [2, 2]}
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    few = [*range(1, 7)]
    expected = ["describe", *(f"describe {part}" for part in (*few, 39, 40))]
    expected += ["replay", *(f"replay {part}" for part in (*few, 99, 100)), "optimizer"]
    assert [name for name in names if name != "network"] == expected


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_profiler_that_fails_costs_a_trace_and_not_the_training(tmp_path, tracer, monkeypatch, caplog, method):
    work = getattr(profile, method)

    def fail(self):
        if method == "stop":
            work(self)
        raise AssertionError("CUPTI is taken")

    with monkeypatch.context() as patch:
        patch.setattr(profile, method, fail)
        train(tracer, 4, asked={1: 1})
    assert traced(tmp_path) == {} and "CUPTI is taken" in caplog.text
    train(tracer, 4, asked={3: 1})
    assert traced(tmp_path) == {4: {"step 4"}}
