"""The log lines of a training, on the standard error: when, how bad, which run, rank and step, and what.

As text, for people and for grep:

    2026-11-14T09:30:05.123Z WARNING run=emoji rank=1 step=12 step 12: shards/3.tar/0007: truncated left out

As JSON, one object a line, for a log collector; `rank` is null in the launcher, `step` before the first one:

    {"time": "...", "level": "warning", "run": "emoji", "rank": 1, "step": 12, "logger": "distap", "message": "..."}

An exception is the field `exception`; a step's figures are fields of their own. There what other packages log,
Python's warnings and uncaught exceptions are such lines too; as text each has its own form. What C++ code prints is
not: TORCH_CPP_LOG_LEVEL and NCCL_DEBUG say how much of that there is.
"""

import json
import logging
import math
import select
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# Ranks share a pipe, where only so much is written in one piece.
LONGEST_LINE = select.PIPE_BUF
CUT = "[...]"
logger = logging.getLogger("distap")


@dataclass
class _Origin:
    """Of the lines of this process."""

    run: str = ""
    rank: int | None = None
    step: int | None = None
    form: LogFormat | None = None  # none: not logging in lines


_origin = _Origin()


def log_lines(form: LogFormat, run: str, rank: int | None) -> None:
    """Log in lines to the standard error from now on.

    Args:
        form: of the lines.
        run: the run's id, the same on all ranks.
        rank: of this process; none is a launcher. Ranks other than 0 tell only warnings and errors.
    """
    _origin.run, _origin.rank, _origin.form = run, rank, form
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.setLevel(logging.WARNING if rank else logging.INFO)
    logger.setLevel(handler.level)
    if form == "text":
        logger.handlers, logger.propagate = [handler], False
        return
    logging.getLogger().handlers = [handler]
    take_over_loggers()
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def is_logging_lines() -> bool:
    """Whether what is told goes into the log, and not to a person at a terminal."""
    return _origin.form is not None


def at_step(step: int) -> None:
    """Name this step, counted from 1, in the lines from now on; 0 is before the first."""
    _origin.step = step


def take_over_loggers() -> None:
    """With JSON, have the loggers that packages have set up for themselves by now write the same lines."""
    if _origin.form != "json":
        return
    logger.handlers = []
    for name in list(logging.root.manager.loggerDict):
        one = logging.getLogger(name)
        talking = [
            handler for handler in one.handlers if getattr(handler, "stream", None) in (sys.stdout, sys.stderr)
        ]
        for handler in talking:
            one.removeHandler(handler)
        if talking or one is logger:
            one.propagate = True


class TextLines(logging.Formatter):
    """One line a record; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """What stands before a traceback."""
        where = f"run={_word(_origin.run)} rank={_word(_origin.rank)} step={_word(_origin.step)}"
        return f"{_time_of(record)} {record.levelname} {where} {record.message}"


class JsonLines(logging.Formatter):
    """One object a record, no longer than what a pipe takes in one piece."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "run": _origin.run,
            "rank": _origin.rank,
            "step": _origin.step,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, figure in getattr(record, "figures", {}).items():
            line[name] = figure if math.isfinite(figure) else None
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _fitted(line)


def _fitted(line: dict[str, Any]) -> str:
    """As JSON, cut where it would be too long: first the frames around an exception, then the end of the message."""
    text = json.dumps(line)
    for name, keeps_end in (("exception", True), ("message", False)):
        over = len(text) + 1 - LONGEST_LINE
        if over > 0 and name in line:
            room = max(0, _length(line[name]) - over - len(CUT))
            line[name] = CUT + _first(line[name][::-1], room)[::-1] if keeps_end else _first(line[name], room) + CUT
            text = json.dumps(line)
    return text


def _first(text: str, room: int) -> str:
    """As much of it as takes so many characters of JSON."""
    for position, character in enumerate(text):
        room -= _length(character)
        if room < 0:
            return text[:position]
    return text


def _length(text: str) -> int:
    return len(json.dumps(text)) - 2  # quotes


def _time_of(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    text = "-" if value is None or value == "" else str(value)
    return json.dumps(text) if " " in text else text


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value
    if error is None or isinstance(error, SystemExit):
        return
    name = arguments.thread.name if arguments.thread is not None else "a thread"
    logger.critical(
        "%s: %s: %s",
        name,
        arguments.exc_type.__name__,
        error,
        exc_info=(arguments.exc_type, error, error.__traceback__),
    )
