import json
import logging
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import Program, started
from small_trainings import recipe

from distap.errors import RESTART
from distap.telemetry.terminal import TextLines

SPEAKING = """
    import logging, sys, threading, warnings
    from distap.telemetry.terminal import origin
    from distap.telemetry.terminal import console, progress, set_up_run_logging

    form, rank = sys.argv[1:]
    set_up_run_logging(form, "mine", int(rank))
    logger = logging.getLogger("distap")
    logger.info("before the first step")
    origin.step = 3
    with progress("step", 5, 2, rank == "0", seconds=0) as show:
        show(3, "loss 0.6")
        show(4, "loss 0.5", loss=0.5, drift=float("nan"))
    logger.warning("two\\nlines of %d%%", 5)
    logging.getLogger("other").error("by another package")
    warnings.warn("a warning of Python's")
    thread = threading.Thread(target=lambda: 1 // 0, name="helper")
    thread.start()
    thread.join()
    raise KeyError("nothing caught it")
"""


def said(form: str, rank: int) -> list[str]:
    """The lines on the standard error of a process that logs."""
    command = [sys.executable, "-c", textwrap.dedent(SPEAKING), form, str(rank)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stderr.splitlines()


@pytest.fixture(scope="module")
def lines() -> list[dict[str, object]]:
    """What rank 0 says as JSON; all of it has to be JSON."""
    return [json.loads(line) for line in said("json", 0)]


def test_each_line_says_when_how_bad_which_run_rank_and_step(lines):
    first = lines[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(first.pop("time")))
    assert first == {
        "level": "info",
        "run": "mine",
        "rank": 0,
        "step": None,
        "logger": "distap",
        "message": "before the first step",
    }
    assert [line["step"] for line in lines] == [None] + [3] * (len(lines) - 1)
    assert {line["run"] for line in lines} == {"mine"}


def test_each_message_is_one_object_whoever_says_it_with_its_figures(lines):
    _, first, message, warned, of_other, of_python, *_ = lines
    assert first["message"] == "step 3/5  loss 0.6"  # one item does not tell how long others take
    assert (message["loss"], message["drift"]) == (0.5, None)
    assert re.fullmatch(r"step 4/5  loss 0\.5, \S+ left", str(message["message"]))
    assert (warned["level"], warned["message"]) == ("warning", "two\nlines of 5%")
    assert [(line["logger"], line["level"]) for line in (of_other, of_python)] == [
        *(("other", "error"), ("py.warnings", "warning"))
    ]
    assert "UserWarning: a warning of Python's" in str(of_python["message"])


def test_an_exception_that_nothing_caught_is_a_field_in_threads_too(lines):
    in_thread, last = lines[6:]
    assert in_thread["message"] == "helper: ZeroDivisionError: integer division or modulo by zero"
    assert str(in_thread["exception"]).startswith("Traceback") and "1 // 0" not in str(
        in_thread["message"]
    )
    assert (last["level"], last["message"]) == ("critical", "KeyError: 'nothing caught it'")
    assert str(last["exception"]).endswith("KeyError: 'nothing caught it'")


def test_other_ranks_tell_only_warnings_and_worse():
    assert {(line["rank"], line["level"]) for line in map(json.loads, said("json", 1))} == {
        (1, "warning"),
        (1, "error"),
        (1, "critical"),
    }


def test_text_without_a_terminal_says_the_same():
    first, _, message, warned, *_ = said("text", 0)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} INFO run=mine rank=0 step=- before the first step", first)
    assert re.fullmatch(
        rf"{time} INFO run=mine rank=0 step=3 step 4/5  loss 0\.5, \S+ left", message
    )
    assert re.fullmatch(rf"{time} WARNING run=mine rank=0 step=3 two", warned)


def test_a_name_cannot_command_the_terminal_that_shows_a_log():
    record = logging.LogRecord(
        "distap", logging.WARNING, "", 0, "%s: damaged", ("\x1b]0;mine\x07\x9b2J\r\tab\n",), None
    )
    assert TextLines().format(record).endswith(r"\x1b]0;mine\x07\x9b2J\x0d" + "\tab\n: damaged")


LAUNCHER = "-m", "distap.launcher", "--standalone"


@pytest.mark.slow
def test_all_that_a_training_says_until_it_is_stopped_is_lines_of_one_run(
    tmp_path, training_shards
):
    config: Path = tmp_path / "recipe.json"
    config.write_text(
        json.dumps(
            recipe(
                tmp_path / "run", training_shards, steps=10_000, logs={"format": "json"}
            ).model_dump(mode="json")
        )
    )
    with started(Program((*LAUNCHER, "--nproc-per-node=2", str(config))), tmp_path) as job:
        job.wait_until(lambda: "step 3/10000" in job.said)
        job.process.send_signal(signal.SIGTERM)
        assert job.status() == RESTART, job.said
        lines = [json.loads(line) for line in job.said.splitlines()]
    assert {line["run"] for line in lines} == {"run"}
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert {line["rank"] for line in lines if line["level"] == "info"} == {0}
    assert {line["rank"] for line in lines if "stopping after this step" in line["message"]} == {
        0,
        1,
    }
    assert lines[-1]["rank"] is None and lines[-1]["message"].startswith("stopped on request: ")


PRINTING = """
    import sys
    from distap.errors import DistapError
    from distap.telemetry.terminal import print_error, set_up_run_logging

    if len(sys.argv) > 1:
        set_up_run_logging(sys.argv[1], "mine", 0)
    print_error(DistapError("data.too_few", "3 images: expected 4"))
"""


def printed_error(*arguments: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(PRINTING), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stderr


def test_the_code_of_an_error_follows_its_message():
    assert printed_error() == "error: 3 images: expected 4 [data.too_few]\n"
    assert printed_error("text").endswith(" step=- 3 images: expected 4 [data.too_few]\n")


def test_the_code_of_an_error_is_a_key_of_its_json_line():
    line = json.loads(printed_error("json"))
    assert (line["level"], line["message"]) == ("error", "3 images: expected 4")
    assert line["code"] == "data.too_few"
