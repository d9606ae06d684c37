"""What all benchmarks share: options, processes, rounds in turns, tables, and files of figures."""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import torch
from pydantic import BaseModel
from typer import Option

from distap import __version__
from distap.errors import DistapError
from distap.pages.page import write_page
from distap.telemetry.terminal import console, text_table, track
from distap.world import World, joined_world

RESULT = "result: "  # rank 0 of a measurement prints its figures after this
Row = dict[str, Any]
T = TypeVar("T")
Backbone = Annotated[str, Option(help="Any timm network.")]
ImageSize = Annotated[int, Option(help="Width and height of the images, pixels.", min=32)]
MicroBatch = Annotated[int, Option(help="Images of a micro-batch.", min=1)]
Rounds = Annotated[int, Option(help="Rounds to measure; the medians count.", min=1)]
Threads = Annotated[int, Option(help="CPU threads.", min=1)]


class FiguresTable(NamedTuple):
    """Cells of text; the first of a row is a name."""

    title: str
    caption: str
    headings: Sequence[str]
    rows: list[list[str]]


def table_of(title: str, caption: str, rows: Sequence[Row], columns: str) -> FiguresTable:
    """Make a table of figures by name.

    Args:
        columns: headings and formats, such as `loss={loss}|ms={ms:,.0f}`; a figure that is None is
            a dash.
    """
    forms = [column.split("=", 1) for column in columns.split("|")]
    cells = [[_cell(form, row) for _, form in forms] for row in rows]
    return FiguresTable(title, caption, [heading for heading, _ in forms], cells)


def _cell(form: str, row: Row) -> str:
    try:
        return form.format(**row)
    except (TypeError, KeyError):  # None has no format
        return "-"


class Report(NamedTuple):
    """Everything that a benchmark found; `figures` is for JSON."""

    figures: Any
    tables: list[FiguresTable]
    notes: Sequence[str] = ()


class Benchmark(BaseModel):
    """The fields are the options of a benchmark's command; `report` measures."""

    name: ClassVar[str]
    json_file: Annotated[Path | None, Option("--json", help="File to write all figures to.")] = None
    page: Annotated[Path | None, Option(help="File to write the tables to as an HTML page.")] = None

    def report(self) -> Report | None:
        """Measure; None on a rank that has nothing to show."""
        raise NotImplementedError

    def on_rank(self, world: World) -> Any:
        """Measure on one of several ranks and return figures for JSON.

        Only those of rank 0 are used.
        """
        raise NotImplementedError

    def run(self) -> None:
        """Measure, print what was found, and write it to files."""
        report = self.report()
        if report is None:
            return
        for table in report.tables:
            console.print(text_table(*table))
        for note in report.notes:
            console.print(note, markup=False)
        self.write(report)

    def write(self, report: Report) -> None:
        """Write the files that the options name."""
        settings = self.model_dump(mode="json")
        if self.json_file is not None:
            everything = {"settings": settings, "machine": machine(), "figures": report.figures}
            self.json_file.parent.mkdir(parents=True, exist_ok=True)
            self.json_file.write_text(json.dumps(everything, indent=1) + "\n")
        if self.page is not None:
            facts = ", ".join(
                f"{name} {value}" for name, value in {**settings, **machine()}.items()
            )
            notes = [facts, *report.notes]
            title = f"distap: {self.name}"
            write_page(
                self.page, "measurements.html", title=title, notes=notes, tables=report.tables
            )


def measure_on_ranks(benchmark: Benchmark, ranks: int, threads: int) -> Any:
    """Return the figures of rank 0 of new processes, each with so many CPU threads.

    If torchrun started this process, its ranks measure, and all but the first get None.
    """
    if "RANK" in os.environ:
        with joined_world() as world:
            figures = benchmark.on_rank(world)
            return figures if world.rank == 0 else None
    command = worker_command(benchmark, ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run(command, env=environment, check=False, **worker_pipes())
    return worker_result(benchmark, done.stdout, done.returncode)


def worker_command(benchmark: Benchmark, ranks: int = 1) -> list[str]:
    """Return the command that measures as one rank, or as several by torchrun.

    To be started with `worker_pipes`.
    """
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [
        sys.executable,
        "-m",
        *(launcher if ranks > 1 else []),
        "benchmarks",
        "worker",
        benchmark.name,
        benchmark.model_dump_json(),
    ]


def measure_in_time(
    benchmark: Benchmark, name: str, seconds: float, device: str, ranks: int = 1
) -> Any:
    """Return the figures of rank 0 of new processes; a DistapError if they fail or take longer."""
    command = worker_command(benchmark, ranks)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment, stderr=log, start_new_session=True, **worker_pipes()
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise DistapError("run.too_slow", f"{name} took more than {seconds} s") from None
        finally:  # else a part that is broken off would go on to hold the GPU's memory
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        log.seek(0)
        if process.returncode:
            raise DistapError(
                "run.failed", f"{name}: " + " | ".join(log.read().strip().splitlines()[-3:])
            )
    return worker_result(benchmark, output, 0)


def worker_pipes() -> dict[str, Any]:
    """Return subprocess's arguments for a worker, which sees at its input that this process is
    gone.

    What workers start, such as torchrun's ranks, inherits their standard input.
    """
    return {"stdin": _lifeline(), "stdout": subprocess.PIPE, "text": True}


@cache
def _lifeline() -> int:
    """Return one end of a pipe, whose other end stays open in this process alone, however it
    ends."""
    return os.pipe()[0]


def work(benchmark: Benchmark) -> None:
    """Measure as one rank, and print the figures on rank 0; end at once when the lifeline does."""

    def wait_for_the_end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with joined_world() as world:
        figures = benchmark.on_rank(world)
        if world.rank == 0:
            print(RESULT + json.dumps(figures), flush=True)


def worker_result(benchmark: Benchmark, output: str, status: int) -> Any:
    """Return the figures that a worker printed."""
    printed = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    if status or not printed:
        raise DistapError(
            "run.failed",
            f"a process of the benchmark {benchmark.name} failed ({benchmark}); see above",
        )
    return json.loads(printed[0])


class Turns(NamedTuple):
    """Seconds of a candidate by round: of the slowest rank, and of all ranks' processors."""

    wall: list[float]
    processor: list[float]

    @property
    def median(self) -> float:
        """Median wall seconds."""
        return statistics.median(self.wall)


def take_turns(
    candidates: Mapping[str, Callable[[], object]], rounds: int, world: World, description: str = ""
) -> dict[str, Turns]:
    """Time every candidate once a round, so that a noisy machine is noisy for all of them.

    Every second round runs backwards, so that slow changes of the machine cancel out. A turn starts
    with a barrier. A description shows the progress.
    """
    taken = {name: Turns([], []) for name in candidates}
    order = order_of_turns(list(candidates), rounds)
    for name in track(order, description, len(order)) if description else order:
        world.barrier()
        synchronise(world.device)
        used = time.process_time()
        started = time.perf_counter()
        candidates[name]()
        synchronise(world.device)
        spent, used = time.perf_counter() - started, time.process_time() - used
        everyone = world.sum(torch.tensor(used, dtype=torch.float64, device=world.device))
        taken[name].wall.append(world.maximum(spent))
        taken[name].processor.append(float(everyone))
    return taken


def order_of_turns(candidates: Sequence[T], rounds: int) -> list[T]:
    """Return whose turn it is in each of the rounds, every second of which runs backwards."""
    return [name for number in range(rounds) for name in candidates[:: -1 if number % 2 else 1]]


def median_ratio(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the median over rounds of left / right."""
    return statistics.median(
        numerator / other for numerator, other in zip(left, right, strict=True)
    )


def synchronise(device: torch.device) -> None:
    """Wait for the work that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine() -> dict[str, str]:
    """Return the device, the date and the versions behind a measurement."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")] or [
        platform.processor()
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else names[0]
    facts = {"device": device, "date": date.today().isoformat(), "distap": __version__}
    if torch.cuda.is_available():
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        facts |= {"driver": asked.stdout.strip(), "cores": str(len(os.sched_getaffinity(0)))}
    return {**facts, "torch": torch.__version__, "python": platform.python_version()}


def over(value: float | None, other: float | None) -> float | None:
    """Return value / other; None if one is not known."""
    return None if value is None or other is None else value / other
