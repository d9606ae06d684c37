import json
import re
import socket

import pytest

from distap import __version__
from distap.telemetry.runlog import (
    STARTS_LOG,
    append_line,
    cut_run_log,
    log_start,
    read_run_log,
    read_starts,
)


def write(folder, step, entries):
    cut_run_log(folder, step)
    for entry in entries:
        append_line(folder / "metrics.jsonl", entry)


def test_numbers_that_are_not_finite_are_null_at_any_depth(tmp_path):
    write(tmp_path, 0, [{"step": 1, "loss": float("nan"), "validation": {"mAP": float("inf")}}])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "validation": {"mAP": None},
    }


def test_going_on_removes_lines_that_cannot_be_read(tmp_path, caplog):
    lines = [
        b'{"step": 1}',
        b"\x80\xff\x00",
        b"[1, 2]",
        b'{"loss": 0.5}',
        b'{"step": "2"}',
        b"",
        b'{"step": 7}',
        b'{"step": 2}',
        b'{"st',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    cut_run_log(tmp_path, 2)
    assert [entry["step"] for entry in read_run_log(tmp_path)] == [1, 2]
    assert [
        int(line) for line in re.findall(r"metrics\.jsonl, line (\d): damaged", caplog.text)
    ] == [2, 3, 4, 5, 6]


def test_a_full_disk_costs_lines_and_not_the_training(small_disk, caplog):
    folder = small_disk("1m")
    ballast = folder / "ballast"
    write(folder, 0, [{"step": 1}])
    ballast.write_bytes(bytes(1024**2 - 4096))  # but for the page that the log has
    append_line(folder / "metrics.jsonl", {"step": 2, "text": "x" * 10_000})
    ballast.unlink()
    write(folder, 2, [{"step": 3}])
    assert [entry["step"] for entry in read_run_log(folder)] == [1, 3]
    assert "metrics.jsonl: a line is lost: [Errno 28] No space left on device" in caplog.text


def test_each_start_of_a_run_is_kept_with_its_host_and_versions(tmp_path):
    assert read_starts(tmp_path) == []  # as of an older run
    for step, ranks in ((0, 2), (7, 1)):
        log_start(tmp_path, step, ranks=ranks)
    with (tmp_path / STARTS_LOG).open("a") as log:
        log.write('{"step": 9, "time"')  # an interruption
    starts = read_starts(tmp_path)
    assert [(start["step"], start["ranks"]) for start in starts] == [(0, 2), (7, 1)]
    assert starts[0]["host"] == socket.gethostname() and starts[0]["time"] <= starts[1]["time"]
    assert {"torch", "python"} <= set(starts[0]) and starts[0]["distap"] == __version__
