import json
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_trainings import train

from distap.errors import DistapError
from distap.registry import REGISTRY
from distap.telemetry.loggers.loggers import LoggedRun, finite_figures, opened_loggers, prepare_loggers
from distap.telemetry.loggers.trackers import MLflow, TensorBoard, WeightsAndBiases
from distap.telemetry.runlog import read_run_log
from distap.world import World

WITH_SECRETS = "https://me:password@example.org/{0..9}.tar?signature=password"


@pytest.fixture(scope="module", autouse=True)
def _mlflow_in_files() -> Iterator[None]:
    """A store of files takes the same calls as a tracking server, which is not in mlflow-skinny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, training_shards) -> tuple[Path, str]:
    """A run of four steps, the last two of which were lost and done again; and MLflow's store."""
    run = tmp_path_factory.mktemp("logged") / "run"
    store = f"file://{run.parent / 'mlruns'}"
    settings = {
        "steps": 4,
        "checkpoint": {"every": 2},
        "data__validation": str(training_shards[1]),
        "evaluation": {"every": 2, "also": {"seen": {"data": str(training_shards[0])}}},
        "loggers": {"tensorboard": {}, "wandb": {}, "mlflow": {}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", store)
        train(World(), run, training_shards, **settings)
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        train(World(), run, training_shards, **settings)
    return run, store


def figures_of_run_log(run: Path) -> dict[tuple[str, int], float]:
    """By name and step."""
    return {
        (name, entry["step"]): value
        for entry in read_run_log(run)
        for name, value in finite_figures({key: entry[key] for key in entry.keys() - {"step", "time"}}).items()
    }


def test_tensorboard_shows_every_figure_at_its_step_and_none_that_was_lost(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = trained
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = [(name, event.step, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    expected = figures_of_run_log(run)
    assert {(name, step): value for name, step, value in shown} == pytest.approx(expected, rel=1e-6)
    assert len(shown) == len(expected)
    assert {"loss", "seconds/describe", "validation/mAP", "also/seen/R@1"} <= {name for name, *_ in shown}
    assert b"test_resnet" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]


def wandb_records(path: Path) -> list:
    """What `wandb sync` would send, up to the exit, which W&B's own process may write after `finish` has returned."""
    deadline = time.monotonic() + 60
    while not (records := list(records_so_far(path))) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, records
        time.sleep(0.05)
    return records


def records_so_far(path: Path) -> Iterator[object]:
    """A log of LevelDB's format, behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 2**15 - at % 2**15) < 7:
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
        figures |= {(name, line["step"]): value for name, value in line.items() if name[0] != "_" and name != "step"}
    return figures


def test_weights_and_biases_goes_on_in_the_run_that_was_interrupted(trained):
    run, _ = trained
    first, second = sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    settings = [record.run for path in (first, second) for record in wandb_records(path) if record.run.run_id]
    assert {one.run_id for one in settings} == {(run / "loggers" / "wandb").read_text()}
    assert [one.display_name for one in settings] == ["run", "run"]
    assert json.loads({item.key: item.value_json for item in settings[0].config.update}["steps"]) == 4
    again = figures_of_wandb(second)
    assert {step for _, step in again} == {3, 4}
    assert figures_of_wandb(first) | again == figures_of_run_log(run)


def mlflow_client(store: str):
    from mlflow.tracking import MlflowClient

    return MlflowClient(store)


def test_mlflow_goes_on_in_the_run_that_was_interrupted_and_marks_it_as_finished(trained):
    run, store = trained
    client = mlflow_client(store)
    (experiment,) = client.search_experiments(filter_string="name = 'distap'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == (run / "loggers" / "mlflow").read_text()
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["model.backbone"] == "test_resnet"
    assert found.data.params["optimizer.name"] == "adam"
    logged = {}
    for name in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, name)
        logged |= {(name, metric.step): metric.value for metric in sorted(history, key=lambda one: one.timestamp)}
    assert logged == {
        (name.replace("@", "_at_"), step): value for (name, step), value in figures_of_run_log(run).items()
    }


def logged_run(folder: Path, step: int = 0, steps: int = 3, **recipe: object) -> LoggedRun:
    return LoggedRun(folder / "run", "mine", recipe, step, steps)


def log_steps(chosen, run, steps) -> list[str]:
    """Log steps; the loggers of lost lines."""
    lost: list[str] = []
    with opened_loggers(chosen, run, lost.append) as log:
        for step in steps:
            log({"step": step, "time": 1000.0 + step, "loss": 1 / step})
    return lost


def test_no_logger_is_told_a_secret_of_an_address(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    chosen = {"tensorboard": TensorBoard(), "wandb": WeightsAndBiases(), "mlflow": MLflow()}
    prepare_loggers(chosen)
    assert log_steps(chosen, logged_run(tmp_path, data={"train": WITH_SECRETS}), [1]) == []
    records = [record for path in tmp_path.rglob("*.wandb") for record in wandb_records(path)]
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # In the bytes of W&B's file any text may be cut in two.
    written[Path(".wandb")] = b"".join(record.SerializeToString() for record in records)
    assert [path for path, data in written.items() if b"password" in data] == []
    shown = [path.name for path, data in written.items() if b"https://example.org/{0..9}.tar" in data]
    for place in ("tfevents", ".wandb", "data.train"):
        assert any(place in name for name in shown), shown


class Recorder:
    """A logger that writes down what it is told, and cannot take some steps."""

    def __init__(self, refused: tuple[int, ...], error: type[BaseException]) -> None:
        self.refused, self.error = refused, error
        self.steps: list[int] = []

    def prepare(self) -> None:
        pass

    def open(self, run: LoggedRun) -> None:
        pass

    def log(self, step: int, time: float, figures: dict[str, float]) -> None:
        if step in self.refused:
            raise self.error(f"no step {step}\nfor a long reason")
        self.steps.append(step)

    def close(self, outcome: str) -> None:
        pass


@pytest.mark.parametrize("error", [OSError, SystemExit])  # packages end the process where a key is missing
def test_a_line_that_a_logger_refuses_is_counted_and_the_others_arrive(tmp_path, caplog, error):
    recorder = Recorder(refused=(2, 3), error=error)
    assert log_steps({"one": recorder}, logged_run(tmp_path), [1, 2, 3, 4]) == ["one", "one"]
    assert recorder.steps == [1, 4]
    assert caplog.messages == [f"loggers.one: figures are lost: {error.__name__}: no step 2; training goes on"]


def test_what_a_server_refuses_later_is_counted_when_mlflow_is_closed(tmp_path, monkeypatch, caplog):
    run = tmp_path / "run" / "loggers" / "mlflow"
    lost: list[str] = []
    store = tmp_path / "mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{store}")
    with opened_loggers({"mlflow": MLflow()}, logged_run(tmp_path), lost.append) as log:
        (metrics,) = store.glob(f"*/{run.read_text()}/metrics")
        metrics.rmdir()
        metrics.touch()  # a file where a folder is to be
        log({"step": 3, "time": 0.0, "loss": 0.5})
    assert lost == ["mlflow"]
    assert "loggers.mlflow: figures are lost" in caplog.text


def test_why_a_logger_fails_is_said_without_the_password_of_its_address(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:password@127.0.0.1:{free.getsockname()[1]}")
        chosen = {"mlflow": MLflow()}
        log_steps(chosen, logged_run(tmp_path), [1])
    assert "loggers.mlflow: figures are lost: MlflowException" in caplog.text
    assert "http://127.0.0.1" in caplog.text and "password" not in caplog.text


@pytest.mark.parametrize("name", REGISTRY["logger"])
def test_a_missing_package_is_named_with_what_installs_it(tmp_path, training_shards, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        DistapError, match=rf"loggers\.{name}: the package {name} is missing; pip install 'distap\[{name}\]'"
    ):
        train(World(), tmp_path / "run", training_shards, steps=1, loggers={name: {}})
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_without_a_key_is_refused_before_training(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(DistapError, match="set WANDB_API_KEY in the environment"):
        prepare_loggers({"wandb": WeightsAndBiases()})
    monkeypatch.setenv("WANDB_MODE", "offline")
    prepare_loggers({"wandb": WeightsAndBiases()})
