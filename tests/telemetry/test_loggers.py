import json
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from raising import raises
from small_trainings import train

from distap.registry import REGISTRY
from distap.telemetry.runlog import (
    LoggedRun,
    TensorBoard,
    WeightsAndBiases,
    finite_figures,
    opened_loggers,
    prepare_loggers,
    read_run_log,
)
from distap.world import World

WITH_SECRETS = "https://me:password@example.org/{0..9}.tar?signature=password"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, training_shards) -> Path:
    """A run of four steps, the last two of which were lost and done again."""
    run = tmp_path_factory.mktemp("logged") / "run"
    settings = {
        "steps": 4,
        "checkpoint": {"every": 2},
        "data__validation": str(training_shards[1]),
        "evaluation": {"every": 2, "also": {"seen": {"data": str(training_shards[0])}}},
        "loggers": ["tensorboard", "wandb"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        train(World(), run, training_shards, **settings)
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        train(World(), run, training_shards, **settings)
    return run


def figures_of_run_log(run: Path) -> dict[tuple[str, int], float]:
    """By name and step."""
    return {
        (name, entry["step"]): value
        for entry in read_run_log(run)
        for name, value in finite_figures(
            {key: entry[key] for key in entry.keys() - {"step", "time"}}
        ).items()
    }


def test_tensorboard_shows_every_figure_at_its_step_and_none_that_was_lost(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = [
        (name, event.step, event.value)
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    ]
    expected = figures_of_run_log(trained)
    assert {(name, step): value for name, step, value in shown} == pytest.approx(expected, rel=1e-6)
    assert len(shown) == len(expected)
    assert {"loss", "seconds/describe", "validation/mAP", "also/seen/R@1"} <= {
        name for name, *_ in shown
    }
    assert b"test_resnet" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]


def wandb_records(path: Path) -> list:
    """What `wandb sync` would send, up to the exit, which W&B's own process may write after
    `finish` has returned.
    """
    deadline = time.monotonic() + 60
    while (
        not (records := list(records_so_far(path)))
        or records[-1].WhichOneof("record_type") != "exit"
    ):
        assert time.monotonic() < deadline, records
        time.sleep(0.05)
    return records


def records_so_far(path: Path) -> Iterator[object]:
    """A log of LevelDB's format, behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        room = 2**15 - at % 2**15
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if at > len(data):
            return
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""


def figures_of_wandb(path: Path) -> dict[tuple[str, int], float]:
    figures = {}
    for record in wandb_records(path):
        line = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        figures |= {
            (name, line["step"]): value
            for name, value in line.items()
            if name[0] != "_" and name != "step"
        }
    return figures


def test_weights_and_biases_goes_on_in_the_run_that_was_interrupted(trained):
    first, second = sorted(
        trained.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    )
    settings = [
        record.run
        for path in (first, second)
        for record in wandb_records(path)
        if record.run.run_id
    ]
    assert {value.run_id for value in settings} == {(trained / "loggers" / "wandb").read_text()}
    assert [value.display_name for value in settings] == ["run", "run"]
    assert (
        json.loads({item.key: item.value_json for item in settings[0].config.update}["steps"]) == 4
    )
    again = figures_of_wandb(second)
    assert {step for _, step in again} == {3, 4}
    assert figures_of_wandb(first) | again == figures_of_run_log(trained)


def logged_run(folder: Path, step: int = 0, **recipe: object) -> LoggedRun:
    return LoggedRun(folder / "run", "mine", recipe, step)


def log_steps(chosen, run, steps) -> None:
    with opened_loggers(chosen, run) as log:
        for step in steps:
            log({"step": step, "time": 1000.0 + step, "loss": 1 / step})


def test_no_logger_is_told_a_secret_of_an_address(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    chosen = {"tensorboard": TensorBoard(), "wandb": WeightsAndBiases()}
    prepare_loggers(chosen)
    log_steps(chosen, logged_run(tmp_path, data={"train": WITH_SECRETS}), [1])
    records = [record for path in tmp_path.rglob("*.wandb") for record in wandb_records(path)]
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # In the bytes of W&B's file any text may be cut in two.
    written[Path(".wandb")] = b"".join(record.SerializeToString() for record in records)
    assert [path for path, data in written.items() if b"password" in data] == []
    shown = [
        path.name for path, data in written.items() if b"https://example.org/{0..9}.tar" in data
    ]
    for place in ("tfevents", ".wandb"):
        assert any(place in name for name in shown), shown


class Recorder:
    """A logger that writes down what it is told, and cannot take some steps."""

    def __init__(self, refused: tuple[int, ...], error: type[BaseException]) -> None:
        self.refused = refused
        self.error = error
        self.steps: list[int] = []

    def prepare(self) -> None:
        pass

    def open(self, run: LoggedRun) -> None:
        pass

    def log(self, step: int, time: float, figures: dict[str, float]) -> None:
        if step in self.refused:
            raise self.error(f"no step {step}\nfor a long reason")
        self.steps.append(step)

    def close(self, failed: bool) -> None:
        pass


# packages end the process where a key is missing
@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_line_that_a_logger_refuses_is_told_once_and_the_others_arrive(tmp_path, caplog, error):
    recorder = Recorder(refused=(2, 3), error=error)
    log_steps({"one": recorder}, logged_run(tmp_path), [1, 2, 3, 4])
    assert recorder.steps == [1, 4]
    assert caplog.messages == [
        f"loggers.one: figures are lost: {error.__name__}: no step 2; training goes on"
    ]


def test_why_a_logger_fails_is_said_without_the_password_of_its_address(tmp_path, caplog):
    class Unreachable(Recorder):
        def open(self, run: LoggedRun) -> None:
            raise self.error("no answer of http://me:password@127.0.0.1:9")

    log_steps({"one": Unreachable((), OSError)}, logged_run(tmp_path), [1])
    assert caplog.messages == [
        "loggers.one: figures are lost: OSError: no answer of http://127.0.0.1:9; training goes on"
    ]


@pytest.mark.parametrize("name", REGISTRY["logger"])
def test_a_missing_package_is_named_with_what_installs_it(
    tmp_path, training_shards, monkeypatch, name
):
    monkeypatch.setitem(sys.modules, name, None)
    with raises("package.missing", name):
        train(World(), tmp_path / "run", training_shards, steps=1, loggers=[name])
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_without_a_key_is_refused_before_training(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with raises("telemetry.no_key", "WANDB_API_KEY"):
        prepare_loggers({"wandb": WeightsAndBiases()})
    monkeypatch.setenv("WANDB_MODE", "offline")
    prepare_loggers({"wandb": WeightsAndBiases()})
