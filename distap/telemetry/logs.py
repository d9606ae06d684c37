"""Write log lines to standard error, with time, level, run, rank and step.

As text, for people and for grep:

    2026-11-14T09:30:05.123Z WARNING run=emoji rank=1 step=12 step 12: shards/3.tar/0007: truncated left out

As JSON, one object per line, for a log collector (`rank` is null in the launcher, `step` before the first step):

    {"time": "...", "level": "warning", "run": "emoji", "rank": 1, "step": 12, "logger": "distap", "message": "..."}

In JSON an exception is the field `exception`, a step's figures are fields, and messages of other packages, Python's
warnings and uncaught exceptions become such lines too. C++ code prints what TORCH_CPP_LOG_LEVEL and NCCL_DEBUG say.
"""

import json
import logging
import math
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from distap.errors import logger
from distap.storage.texts import printable

LogFormat = Literal["text", "json"]


@dataclass
class LogOrigin:
    """The process named in log lines."""

    run: str = ""
    rank: int | None = None
    step: int | None = None
    form: LogFormat | None = None  # None: messages are text at a terminal, not log lines


origin = LogOrigin()  # of this process; the training sets `step`, counted from 1


def log_lines(form: LogFormat, run: str, rank: int | None) -> None:
    """Log to standard error: all lines of rank 0 and of a launcher (None), warnings and errors of other ranks."""
    origin.run, origin.rank, origin.form = run, rank, form
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.setLevel(logging.WARNING if rank else logging.INFO)
    logger.setLevel(handler.level)
    if form == "text":
        logger.handlers, logger.propagate = [handler], False
        return
    logging.getLogger().handlers = [handler]
    logger.handlers, logger.propagate = [], True
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda arguments: _log_uncaught(*arguments)


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"


class TextLines(_Formatter):
    """Format a record as one line; a traceback follows on further lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        where = f"run={_word(origin.run)} rank={_word(origin.rank)} step={_word(origin.step)}"
        return printable(f"{self.formatTime(record)} {record.levelname} {where} {record.message}")


class JsonLines(_Formatter):
    """Format a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
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
        return json.dumps(line)


def _word(value: object) -> str:
    text = "-" if value is None or value == "" else str(value)
    return json.dumps(text) if " " in text else text


def _log_uncaught(kind: type, error: Any, trace: Any, thread: threading.Thread | None = None) -> None:
    if error is not None and not isinstance(error, SystemExit):
        where = f"{thread.name}: " if thread is not None else ""
        logger.critical("%s%s: %s", where, kind.__name__, error, exc_info=(kind, error, trace))
