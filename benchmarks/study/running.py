"""Run the trainings of a study, a few at once, and keep what each reached as a JSON line."""

import os
import resource
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import date
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_json

from benchmarks.study.grid import HEADLINE, Grid, Job, Point
from benchmarks.study.results import Result, Results, read_results, require_figures
from distap import __version__
from distap.data.shards.parallel import usable_cores
from distap.errors import FINISHED, DistapError
from distap.processes.forks import last_error, start_training
from distap.registry import by_path
from distap.stopwatch import Stopwatch
from distap.storage.atomic import write_whole
from distap.telemetry.runlog import append_line, read_run_log
from distap.training.start_checks import evaluated_figures, open_data
from distap.world import World

RESULTS = "results.jsonl"
OUTPUT = "output.log"  # what a training prints


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder if needed, and lock it.

    Raise a DistapError while another process has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise DistapError(
                "run.in_use", f"{folder}: another process is training a study there; wait for it"
            ) from error
        try:
            yield
        finally:
            # a process that was forked meanwhile has the file too, and would keep the lock
            flock(file, LOCK_UN)


class StudyRun:
    """Trains what is missing in folder/results.jsonl.

    Args:
        seeds: trainings of each point, the search apart.
        jobs: trainings at once, each with its share of the cores.
        ranks: processes of each.
    """

    def __init__(self, grid: Grid, seeds: int, jobs: int, ranks: int) -> None:
        self.grid = grid
        self.most = jobs
        self.ranks = ranks
        self.threads = os.environ.get(
            "OMP_NUM_THREADS", str(max(1, usable_cores() // (jobs * ranks)))
        )
        self.file = grid.folder / RESULTS
        self.results = Results(grid, seeds)
        self.total = len(grid.points) * (len(grid.jobs(grid.points[0], 0)) + seeds - 1)
        self.problems: list[str] = []
        self._running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}  # by process id
        self._searched: list[Point] = []  # points whose further seeds wait or are done

    def train(self) -> Iterator[str]:
        """Train; yield a line about each training that has ended, and each that was done before."""
        waiting = deque(job for point in self.grid.points for job in self.grid.jobs(point, 0))
        with ExitStack() as stack:
            stack.enter_context(_locked(self.grid.folder))
            for result in read_results(self.file):
                self.results.add(result)
            write_whole(
                self.file, b"".join(to_json(asdict(result)) + b"\n" for result in self.results.done)
            )
            stack.callback(self._stop)
            self._require_data([job for job in waiting if self.results.of(job) is None])
            while waiting or self._running:
                if waiting and len(self._running) < self.most:
                    job = waiting.popleft()
                    if self.results.of(job) is None:
                        self._start(job)
                        continue
                    message = f"{self._done(job)}, done before"
                else:
                    job, message = self._wait()
                # first, so that rows are whole one after the other
                waiting.extendleft(self._next(job.point))
                yield message

    def _require_data(self, jobs: Sequence[Job]) -> None:
        """Open the data of trainings, each once.

        Raises:
            DistapError: some cannot be opened, or is not evaluated by a figure of the study.
        """
        opened = set[str]()
        for job in jobs:
            sections = job.recipe.model_dump_json(include={"data", "evaluation", "sampling"})
            if sections in opened:
                continue
            opened.add(sections)
            try:
                sets = open_data(job.recipe, World(), Stopwatch())[1]
                figures = evaluated_figures(job.recipe, sets)
            except DistapError as error:
                where = ""
                if error.code.startswith(("data.", "storage.")):
                    where = f" (relative paths of data begin in the current folder, {Path.cwd()})"
                raise DistapError(error.code, f"{job}: {error}{where}") from error
            validation = figures[job.recipe.headline]
            also = {
                name: figures[name] for name in figures if name != str(job.recipe.data.validation)
            }
            entry = {HEADLINE: validation, "also": also}
            require_figures(self.grid, job, figures_of(entry))

    def _next(self, point: Point) -> list[Job]:
        """The further seeds of a point, once, as soon as its best values are known."""
        best = self.results.best(point)
        if best is None or point in self._searched:
            return []
        self._searched.append(point)
        return [
            self.grid.jobs(point, seed, best.searched)[0] for seed in range(1, self.results.seeds)
        ]

    def _start(self, job: Job) -> None:
        folder = job.run
        recipe = job.run / "study.yaml"
        settings = {**job.settings, "run": str(folder)}
        # One training also evaluates the network that all begin with.
        at_start = self.results.share_a_start and not self._running and not self.results.before()
        settings["evaluation"] = {**settings.get("evaluation", {}), "at_start": at_start}
        if self.most > 1:  # they cannot all listen there
            settings["metrics"] = {**settings.get("metrics", {}), "port": None}
        if not recipe.exists():  # a training that was interrupted goes on as it began
            write_whole(recipe, yaml.safe_dump(settings))
        process = start_training(recipe, self.ranks, folder / OUTPUT, OMP_NUM_THREADS=self.threads)
        self._running[process.pid] = job, process

    def _wait(self) -> tuple[Job, str]:
        """Wait for a training to end; return it, and what to tell."""
        ended, status, usage = os.wait4(-1, 0)
        job, process = self._running.pop(ended)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != FINISHED:
            output = job.run / OUTPUT
            self.problems.append(
                f"{job}: ended with status {process.returncode}: {last_error(output)} ({output})"
            )
            return job, self.problems[-1]
        result = self._result(job, usage)
        self.results.add(result)
        append_line(self.file, asdict(result))
        return job, self._done(job)

    def _result(self, job: Job, usage: resource.struct_rusage) -> Result:
        log = read_run_log(job.run)
        steps = {entry["step"]: entry for entry in log if "loss" in entry}
        evaluations = {entry["step"]: figures_of(entry) for entry in log if "validation" in entry}
        last = max(steps, default=0)
        if last not in evaluations:
            raise DistapError(
                "run.no_evaluation",
                f"{job.run}: its log has no evaluation after the last step; remove the folder",
            )
        made = {
            "date": str(date.today()),
            "distap": __version__,
            "torch": version("torch"),
            "ranks": self.ranks,
        }
        return Result(
            names=dict(job.point.names),
            searched=dict(job.searched),
            seed=job.recipe.seed,
            fingerprint=job.fingerprint,
            figures=evaluations[last],
            before=evaluations.get(0, {}),
            steps=len(steps),
            images=sum(entry["images"] for entry in steps.values()),
            seconds=round(sum(entry["seconds"]["step"] for entry in steps.values()), 2),
            processor_seconds=round(usage.ru_utime + usage.ru_stime, 2),
            memory_bytes=usage.ru_maxrss * 1024,
            made=made | {"threads": int(self.threads), "at_once": self.most},
        )

    def _done(self, job: Job) -> str:
        """Remove the checkpoints of a training whose result is kept, and say what it reached."""
        shutil.rmtree(job.run / "checkpoints", ignore_errors=True)
        result = self.results.of(job)
        by = self.grid.chosen_by
        assert result is not None
        return f"{job}: {by} {100 * result.figures[by]:.1f} in {result.seconds:.0f} s"

    def _stop(self) -> None:
        """Ask all trainings to stop; they write a checkpoint, from which the next call goes on."""
        for _, process in self._running.values():
            process.terminate()
        for _, process in self._running.values():
            process.wait()


def figures_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a log's line about an evaluation, as SET/FIGURE."""
    return dict(by_path({HEADLINE: entry[HEADLINE], **entry.get("also", {})}, "/"))
