"""Log lines on the standard error, with time, level, run, rank and step.

As text, for people and for grep:

    2026-11-14T09:30:05.123Z WARNING run=emoji rank=1 step=12 step 12: shards/3.tar/0007: truncated left out

As JSON, one object a line, for a log collector (`rank` is null in the launcher, `step` before the first step):

    {"time": "...", "level": "warning", "run": "emoji", "rank": 1, "step": 12, "logger": "distap", "message": "..."}

In JSON an exception is the field `exception`, a step's figures are fields, and messages of other packages, Python's
warnings and uncaught exceptions become such lines too. C++ code prints what TORCH_CPP_LOG_LEVEL and NCCL_DEBUG say.
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
# Ranks share a pipe, which takes no more than this in one piece.
LONGEST_LINE = select.PIPE_BUF
CUT = "[...]"
logger = logging.getLogger("distap")


@dataclass
class LogOrigin:
    """Which process the lines come from."""

    run: str = ""
    rank: int | None = None
    step: int | None = None
    form: LogFormat | None = None  # None: this process logs no lines


origin = LogOrigin()


def log_lines(form: LogFormat, run: str, rank: int | None) -> None:
    """Log lines to the standard error from now on.

    Args:
        form: text or JSON.
        run: the run's id, the same on all ranks.
        rank: rank of this process, None for a launcher. Ranks other than 0 log warnings and errors only.
    """
    origin.run, origin.rank, origin.form = run, rank, form
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
    """Tell whether messages go into a log, and not to a person at a terminal."""
    return origin.form is not None


def at_step(step: int) -> None:
    """Name this step, counted from 1, in lines from now on."""
    origin.step = step


def take_over_loggers() -> None:
    """With JSON, redirect loggers that packages have set up by now into the same lines."""
    if origin.form != "json":
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
    """Write a record as one line; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        where = f"run={_word(origin.run)} rank={_word(origin.rank)} step={_word(origin.step)}"
        return f"{_time_of(record)} {record.levelname} {where} {record.message}"


class JsonLines(logging.Formatter):
    """Write a record as one JSON object, short enough for a pipe to take in one piece."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "run": origin.run,
            "rank": origin.rank,
            "step": origin.step,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, figure in getattr(record, "figures", {}).items():
            line[name] = figure if math.isfinite(figure) else None
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _fitted(line)


def _fitted(line: dict[str, Any]) -> str:
    """Write JSON; shorten a line that is too long: first the traceback's beginning, then the message's end."""
    text = json.dumps(line)
    for name, keeps_end in (("exception", True), ("message", False)):
        over = len(text) + 1 - LONGEST_LINE
        if over > 0 and name in line:
            room = max(0, _length(line[name]) - over - len(CUT))
            line[name] = CUT + _first(line[name][::-1], room)[::-1] if keeps_end else _first(line[name], room) + CUT
            text = json.dumps(line)
    return text


def _first(text: str, room: int) -> str:
    """Return the longest beginning that takes at most `room` characters of JSON."""
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
