"""What the terminal shows: progress, and messages of one format; a training without one logs lines instead."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from distap.telemetry.logs import LogFormat, is_logging_lines, log_lines

T = TypeVar("T")

logger = logging.getLogger("distap")
console = Console(stderr=True, highlight=False, soft_wrap=True)
if not console.is_terminal:
    console.width = 140  # of a log, where nothing says how wide it is shown


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items while a bar shows how far it is; where there is no terminal, a line at the end."""
    with _progress() as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task)
    if not _draws():
        _tell(f"{description}: {total} done")


class TrainingProgress:
    """A bar over the steps with the last step's figures; without a terminal, or with JSON, a line a step."""

    def __init__(self, progress: Progress | None, steps: int, done: int) -> None:
        self._progress, self._steps = progress, steps
        self._task = progress.add_task("training", total=steps, completed=done) if progress else None

    def show(self, step: int, text: str, **figures: float) -> None:
        """`step` steps are done; `text` says how the last went, and so do the figures, for programs."""
        if self._progress is None or self._task is None:
            return
        self._progress.update(self._task, completed=step, description=f"training  {text}")
        if not _draws():
            _tell(f"step {step}/{self._steps}  {text}", **figures)


@contextmanager
def training_progress(steps: int, done: int, shown: bool) -> Iterator[TrainingProgress]:
    """Progress of a training on rank 0; elsewhere `shown` is False and nothing is printed."""
    if not shown:
        yield TrainingProgress(None, steps, done)
        return
    with _progress() as progress:
        yield TrainingProgress(progress, steps, done)


@contextmanager
def counting(description: str, total: int, done: int = 0, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar over images with how many a second there are; where there is no terminal, a line at the end.

    Args:
        description: of what is done.
        total: images.
        done: those that were done before, which count for no speed.
        shown: whether anything is printed.
    Yields:
        What is to be told how many images are done beside `done`.
    """
    started, most = time.monotonic(), 0

    def speed() -> str:
        return f"{most / max(time.monotonic() - started, 1e-9):,.1f} images/s"

    with _progress() if shown else nullcontext() as progress:
        task = progress.add_task(escape(description), total=total, completed=done) if progress else None

        def show(images: int) -> None:
            nonlocal most
            most = images
            if progress is not None and task is not None:
                progress.update(task, completed=done + images, description=f"{escape(description)}  {speed()}")

        yield show
    if shown and not _draws():
        _tell(f"{description}: {done + most} of {total} done, {speed()}")


def _draws() -> bool:
    """Whether bars can be shown."""
    return console.is_terminal and not is_logging_lines()


def _tell(text: str, **figures: float) -> None:
    if is_logging_lines():
        logger.info("%s", text, extra={"figures": figures})
    else:
        console.print(text, markup=False)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=not _draws(),
        disable=not _draws(),
    )


def figures_table(columns: dict[str, dict[str, float]]) -> Table:
    """Results side by side, one column each, in percent; with two columns, the gain in points as well."""
    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    if len(columns) == 2:
        table.add_column("gain", justify="right")
    for figure in next(iter(columns.values())):
        values = [100 * column[figure] for column in columns.values()]
        gain = [f"{values[1] - values[0]:+.1f}"] if len(values) == 2 else []
        table.add_row(figure, *(f"{value:.1f}" for value in values), *gain)
    return table


def text_table(title: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is a name and whose other columns are figures."""
    table = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        # Headings may wrap, so that figures are whole on a narrow terminal.
        table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table


def set_up_logging(rank: int) -> logging.Logger:
    """Messages of a command to the terminal: all of rank 0's, warnings of the others, each with its rank."""
    logger.handlers = [handler := _ConsoleHandler()]
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if rank else "%(message)s"))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    return logger


def set_up_run_logging(form: LogFormat, run: str, rank: int | None) -> None:
    """Messages of a training: to a terminal as those of a command, elsewhere and as JSON in lines.

    Args:
        form: of the lines.
        run: the run's id.
        rank: none is a launcher.
    """
    if form == "text" and console.is_terminal:
        set_up_logging(rank or 0)
    else:
        log_lines(form, run, rank)


def set_up_early_logging(overrides: Sequence[str], rank: int | None) -> None:
    """As JSON where the overrides ask for it, so that what is wrong with a recipe is told as JSON too."""
    if "logs.format=json" in overrides:
        log_lines("json", "", rank)


def print_error(error: Exception) -> None:
    """Tell an error that is meant for a person, without a traceback."""
    if is_logging_lines():
        logger.error("%s", error)
    else:
        console.print(f"error: {error}", markup=False, style="red")


class _ConsoleHandler(logging.Handler):
    """Prints above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        console.print(
            self.format(record), markup=False, style="yellow" if record.levelno >= logging.WARNING else None
        )
