"""Print results to standard output; print progress and messages to standard error, or log them.

A log line has time, level, run, rank and step. As text, for people and for grep:

    2026-11-14T09:30:05.123Z WARNING run=emoji rank=1 step=12 step 12: left out: 3.tar:7: truncated

As JSON, one object per line, for a log collector (`rank` is null in the launcher, `step` before the
first step):

    {"time": "...", "level": "warning", "run": "emoji", "rank": 1, "step": 12,
     "logger": "distap", "message": "..."}

In JSON an exception is the field `exception`, a step's figures are fields, and messages of other
packages, Python's warnings and uncaught exceptions become such lines too. C++ code prints what
TORCH_CPP_LOG_LEVEL and NCCL_DEBUG say.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic_core import to_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from distap.errors import DistapError, logger, without_secrets
from distap.storage.texts import printable

T = TypeVar("T")
LogFormat = Literal["text", "json"]
LOG_SECONDS = 30.0  # from one line about progress to the next, without a terminal
# Progress of the last so many seconds gives the estimate of the time left.
RECENT_SECONDS = 600.0
FILE_COLUMNS = 250  # of a file or pipe that results go to, so that a row of a table is one line


@dataclass
class LogOrigin:
    """The process named in log lines."""

    run: str = ""
    rank: int | None = None
    step: int | None = None
    form: LogFormat | None = None  # None: messages are text at a terminal, not log lines


origin = LogOrigin()  # of this process; the training sets `step`, counted from 1


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Go on without a reader, such as `head`, since files may still have to be written."""
        self.silence()

    def silence(self) -> None:
        """Drop what is printed from now on, and what waits to be written."""
        self.quiet = True
        # a stream may have no number
        with Path(os.devnull).open("wb") as nowhere, suppress(OSError, ValueError):
            os.dup2(nowhere.fileno(), self.file.fileno())


class _Messages(_Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(without_secrets(text), **options)


# messages and progress
console = _Messages(stderr=True, highlight=False, soft_wrap=True, emoji=False)
results = _Console(highlight=False, soft_wrap=True, emoji=False)
if not console.is_terminal:
    console.width = 140  # a log has no width of its own
if not results.is_terminal:
    results.width = FILE_COLUMNS


def print_result(*items: object) -> None:
    """Print a command's results (lines and tables) to standard output."""
    with _reporting_full_disk():
        for item in items:
            # A text may hold brackets, such as a class called [red], which rich would take for
            # markup.
            results.print(item, markup=not isinstance(item, str))


def print_text(text: str) -> None:
    """Print a text for programs, such as JSON or YAML, to standard output without formatting."""
    with _reporting_full_disk():
        results.out(text, highlight=False)


@contextmanager
def _reporting_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        results.silence()  # else Python would try once more when it ends
        raise DistapError(
            "command.output_lost", f"standard output: cannot be written: {error.strerror or error}"
        ) from error


def print_warning(text: str) -> None:
    console.print(text, markup=False, style="yellow")


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items and show a progress bar over them."""
    with progress(description, total) as show:
        for done, item in enumerate(items, 1):
            yield item
            show(done)


@contextmanager
def progress(
    description: str, total: int, done: int = 0, shown: bool = True, seconds: float = LOG_SECONDS
) -> Iterator[Callable[..., None]]:
    """Open a progress bar. Without a terminal, or with JSON, log every `seconds` s and at the end.

    Yield a function of the number of items done by now, a text about the last one and, for
    programs, figures by name. It shows the text, or else the speed, and the time left, judged by
    the items of the last RECENT_SECONDS.
    """
    started = time.monotonic()
    logged = started  # time of the last line
    description = printable(description)
    draws = shown and console.is_terminal and origin.form is None
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not draws,
        speed_estimate_period=RECENT_SECONDS,
    ) as bar:
        task = bar.add_task(escape(description), total=total, completed=done)

        def show(now: int, text: str = "", **figures: float) -> None:
            nonlocal done, logged
            done = now
            bar.update(task, completed=done)
            speed = bar.tasks[0].speed
            left = bar.tasks[0].time_remaining
            if not text and speed:
                text = f"{speed:,.3g} a second"
            if left is not None:
                text += f", {timedelta(seconds=round(left))} left"

            if draws:
                bar.update(task, description=escape(f"{description}  {text}"))
            elif shown and time.monotonic() - logged >= seconds:
                logged = time.monotonic()
                print_progress(f"{description} {done}/{total}  {text}", **figures)

        yield show
    if shown and not draws and seconds:
        took = time.monotonic() - started
        print_progress(f"{description} {done}/{total}  done in {took:.1f} s")


def print_progress(text: str, **figures: float) -> None:
    """Print or log a message about progress, which holds no control characters."""
    if origin.form is not None:
        logger.info("%s", text, extra={"figures": figures})
    else:
        console.print(Text(text))


def figures_table(columns: dict[str, dict[str, float]]) -> Table:
    """Draw results in percent, one column each; with two columns, add the gain in points."""
    gains = ["gain"] if len(columns) == 2 else []
    rows = list[list[str]]()
    for figure in {name: None for column in columns.values() for name in column}:
        values = [100 * column.get(figure, float("nan")) for column in columns.values()]
        gain = [f"{values[1] - values[0]:+.1f}"] if gains else []
        rows.append([figure, *(f"{value:.1f}" for value in values), *gain])
    return text_table("", "", ["", *columns, *gains], rows)


def rows_of_sets(figures: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """Lay out the figures of data sets, 0 to 1, in percent: a row for each set, after a heading.

    A part of the queries has its own row: `Easy mAP` of oxford is mAP of `oxford Easy`.
    """
    table = dict[str, dict[str, str]]()
    for name, values in figures.items():
        for figure, value in values.items():
            domain, _, kind = figure.rpartition(" ")
            cell = "–" if value is None or math.isnan(value) else f"{100 * value:.1f}"
            table.setdefault(f"{name} {domain}".strip(), {})[kind] = cell
    kinds = [*dict.fromkeys(kind for row in table.values() for kind in row)]
    return [["set", *kinds]] + [
        [name, *(row.get(kind, "–") for kind in kinds)] for name, row in table.items()
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def text_table(
    title: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """Return a table whose first column is a name and whose others are figures."""
    table = Table(
        title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for number, heading in enumerate(headings):
        # Headings may wrap, so that figures are whole on a narrow terminal.
        table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table


def set_up_logging(rank: int, as_results: bool = False) -> None:
    """Print a command's messages: all of rank 0, and warnings of other ranks with their rank.

    With `as_results`, all but warnings goes to standard output, since the command was called for
    it.
    """
    handler = _ConsoleHandler()
    handler.target = results if as_results else console
    logger.handlers = [handler]
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if rank else "%(message)s"))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


def set_up_run_logging(form: LogFormat, run: str, rank: int | None) -> None:
    """Print a training's messages at a terminal; otherwise write log lines to standard error.

    Rank 0 and a launcher (None) log everything, other ranks their warnings and errors.
    """
    if form == "text" and console.is_terminal:
        set_up_logging(rank or 0)
        return
    origin.run = run
    origin.rank = rank
    origin.form = form
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.setLevel(logging.WARNING if rank else logging.INFO)
    logger.setLevel(handler.level)
    if form == "text":
        logger.handlers = [handler]
        logger.propagate = False
        return
    logging.getLogger().handlers = [handler]
    logger.handlers = []
    logger.propagate = True
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda arguments: _log_uncaught(*arguments)


def print_error(error: Exception) -> None:
    """Print an error with its code, without a traceback; once per host if all ranks have it.

    JSON log lines have the code as a key, others in brackets at their end.
    """
    if getattr(error, "is_on_all_ranks", False) and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    code = getattr(error, "code", "")
    text = f"{error} [{code}]" if code else str(error)
    if origin.form == "json":
        logger.error("%s", error, extra={"figures": {"code": code}})
    elif origin.form == "text":
        logger.error("%s", text)
    else:
        console.print(f"error: {text}", markup=False, style="red")


class _ConsoleHandler(logging.Handler):
    """Print messages above a progress bar, not through it."""

    target: Console = console  # of all but warnings

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print_warning(self.format(record))
        else:
            self.target.print(self.format(record), markup=False)


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


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
            "message": without_secrets(record.getMessage()),
        }
        line |= getattr(record, "figures", {})
        if record.exc_info:
            line["exception"] = without_secrets(self.formatException(record.exc_info))
        return to_json(line, inf_nan_mode="null").decode()


def _word(value: object) -> str:
    text = "-" if value is None or value == "" else str(value)
    return json.dumps(text) if " " in text else text


def _log_uncaught(
    kind: type, error: Any, trace: Any, thread: threading.Thread | None = None
) -> None:
    if error is not None and not isinstance(error, SystemExit):
        where = f"{thread.name}: " if thread is not None else ""
        logger.critical("%s%s: %s", where, kind.__name__, error, exc_info=(kind, error, trace))
