"""`distap report RUN --follow`: the page of a run is written again until the training ends."""

import os
import signal

import pytest
from commands import distap
from launching import Program, started
from run_folders import write_run
from trainings import Run

from distap.errors import RESTART


@pytest.mark.slow
def test_a_page_follows_a_training_until_it_stops(tmp_path, training_shards):
    run = Run(tmp_path, training_shards, steps=100_000)
    page = run.folder / "report.html"
    command = ("-m", "distap.cli", "report", str(run.folder), "--follow", "1")
    with run.started(1) as training:
        training.wait_until(lambda: run.has_done(2))
        with started(Program(command, tmp_path), tmp_path / "following") as following:
            following.wait_until(page.exists)
            first = page.read_text()
            assert '<meta http-equiv="refresh" content="1">' in first
            following.wait_until(lambda: page.read_text() != first)
            assert page.read_text().rstrip().endswith("</html>")
            os.kill(training.process.pid, signal.SIGTERM)
            assert training.status() == RESTART
            assert following.status() == 0
    assert "http-equiv" not in page.read_text()


def test_the_page_of_a_run_that_does_not_train_is_written_once(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 3, validated=False)
    (run / "lease.json").write_text("{}")
    os.utime(run / "lease.json", (0, 0))  # of a training that was killed
    assert distap(monkeypatch, "report", run, "--follow", "3600") == 0
    assert "http-equiv" not in (run / "report.html").read_text()
