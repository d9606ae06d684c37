"""Traces of the next steps on demand, by torch's profiler: where a slow step spends its time.

Every rank writes `step-S.rank-R.json.gz`, which Perfetto (ui.perfetto.dev) and chrome://tracing show. The stages
stand in it by their names, over what they called. Whatever the profiler does, the training goes on.
"""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

STEPS, MOST_STEPS = 1, 20  # a step of thousands of images is a large file already
QUIET = "99"
logger = logging.getLogger("distap")


class Tracer:
    """One rank's.

    Args:
        folder: that traces are written to.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._asked = self._agreed = 0  # steps, by someone and then by all ranks
        self._profiler: profile | None = None
        self._first = self._last = 0  # step of the trace, the same on all ranks

    def ask(self, steps: int = STEPS) -> None:
        """Have the next `steps` steps traced; it may come from any thread, and the ranks then agree on it."""
        self._asked = max(self._asked, steps)

    def asked(self) -> int:
        """Steps that this rank was asked to trace since the last call, 0 for none."""
        steps, self._asked = self._asked, 0
        return steps

    def agreed(self, steps: int) -> None:
        """All ranks are to trace so many steps: the next ones, or where these are traced already, those after."""
        self._agreed = max(self._agreed, steps)

    def begin(self, done: int) -> None:
        """Trace the steps that follow the `done` ones, where the ranks have agreed on that."""
        if not self._agreed or done < self._last:
            return
        # Its library would report to the terminal that it begins and ends, and as an error that there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._first, self._last, self._agreed = done + 1, done + self._agreed, 0
        try:
            profiler = profile(activities=activities, acc_events=True)
            profiler.start()
        except Exception as error:
            logger.warning("rank %d does not trace step %d to %d: %s", self._rank, self._first, self._last, error)
            return
        self._profiler = profiler
        if self._rank == 0:
            logger.info("tracing step %d to %d", self._first, self._last)

    def step_done(self, done: int) -> None:
        """`done` steps are done; where the last traced one is among them, write the trace."""
        if self._profiler is not None and done >= self._last:
            self._write(self._profiler, done)

    def interrupt(self, done: int) -> None:
        """Something other than a step comes now: the steps that are left get a trace of their own after it."""
        left, self._last = self._last - done, min(self._last, done)
        if left > 0:
            self.agreed(left)
        self.close(done)

    def close(self, done: int) -> None:
        """Write what there is of a trace that is cut short, as by the end of training."""
        if self._profiler is not None:
            self._write(self._profiler, done)

    def _write(self, profiler: profile, last: int) -> None:
        self._profiler = None
        path = self._folder / f"step-{self._first}.rank-{self._rank}.json.gz"
        draft = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.add_metadata_json("distap", json.dumps({"rank": self._rank, "steps": [self._first, last]}))
            profiler.export_chrome_trace(str(draft))
            draft.replace(path)
        except Exception as error:  # the profiler's own, or of a full disk
            with suppress(OSError):
                draft.unlink()
            logger.warning("%s: the trace cannot be written: %s", path, error)
            return
        if self._rank == 0:
            logger.info("traced step %d to %d: %s, and a file beside it for each other rank", self._first, last, path)
