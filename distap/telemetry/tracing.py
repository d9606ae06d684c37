"""Trace the next steps on demand with torch's profiler.

Every rank writes `step-S.rank-R.json.gz`, which Perfetto (ui.perfetto.dev) and chrome://tracing show. The stages
appear in it under their names. Of a stage's many micro-batches it has the first and the last, so that memory, the
file and the time to write it, beside the training, do not grow with the batch. Errors of the profiler never end the
training.
"""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from threading import Thread

import torch
from torch.profiler import ProfilerActivity, profile

STEPS, MOST_STEPS = 1, 5
FIRST, LAST = 6, 2  # parts of a stage that are traced: a micro-batch has two or three, such as a forward pass
QUIET = "99"
logger = logging.getLogger("distap")


class Tracer:
    """Traces one rank's steps into a folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._asked = self._agreed = 0  # numbers of steps: asked of this rank, agreed on by all
        self._profiler: profile | None = None
        self._first = self._last = 0  # step of the trace, the same on all ranks
        self._stage, self._parts = "", 0  # the present stage, and how many of its parts have begun
        self._parts_of: dict[str, int] = {}  # of each stage when it was done last
        self._collects = True
        self._writing: Thread | None = None
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._activities = [ProfilerActivity.CPU, *gpu]

    def ask(self, steps: int = STEPS) -> None:
        """Ask for a trace of the next `steps` steps, from any thread; the ranks then agree on it."""
        self._asked = max(self._asked, steps)

    def asked(self) -> int:
        """Return how many steps this rank was asked to trace since the last call."""
        steps, self._asked = self._asked, 0
        return steps

    def agreed(self, steps: int) -> None:
        """Note that all ranks will trace this many steps, after a trace that is under way."""
        self._agreed = max(self._agreed, steps)

    def begin(self, done: int) -> None:
        """Start the trace that the ranks have agreed on, if any; `done` steps are done."""
        if not self._agreed or done < self._last:
            return
        # The profiler's library would print its begin and end, and an error if there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._first, self._last, self._agreed = done + 1, done + self._agreed, 0
        try:
            profiler = profile(activities=self._activities, acc_events=True)
            profiler.start()
        except Exception as error:
            logger.warning("rank %d does not trace step %d to %d: %s", self._rank, self._first, self._last, error)
            return
        self._profiler, self._collects = profiler, True
        if self._rank == 0:
            logger.info("tracing step %d to %d", self._first, self._last)

    def stage_begins(self, name: str, is_inner: bool) -> None:
        """Trace a stage, and of its parts the first and the last, of which there are as many as the time before."""
        if is_inner:
            self._parts += 1
        else:
            self._parts_of[self._stage] = self._parts
            self._stage, self._parts = name, 0
        collects = self._parts <= FIRST or self._parts > self._parts_of.get(self._stage, 0) - LAST
        if self._profiler is not None and collects != self._collects:
            self._collects = collects
            torch._C._autograd._enable_record_function(collects)
            if ProfilerActivity.CUDA in self._activities:
                self._profiler.toggle_collection_dynamic(collects, [ProfilerActivity.CUDA])

    def step_done(self, done: int) -> None:
        """Write the trace if its last step is done."""
        if done >= self._last:
            self.close(done)

    def interrupt(self, done: int) -> None:
        """End the trace before something that is no step; a second trace takes the steps that are left."""
        left, self._last = self._last - done, min(self._last, done)
        if left > 0:
            self.agreed(left)
        self.close(done)

    def close(self, done: int) -> None:
        """Write a trace if one is under way, beside the training."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        torch._C._autograd._enable_record_function(True)
        try:
            profiler.add_metadata_json("distap", json.dumps({"rank": self._rank, "steps": [self._first, done]}))
            profiler.stop()
        except Exception as error:
            logger.warning("rank %d has no trace of step %d to %d: %s", self._rank, self._first, done, error)
            return
        self.finish()
        self._writing = Thread(target=self._write, args=(profiler, done, self._first), name="distap-trace")
        self._writing.start()

    def finish(self) -> None:
        """Wait for the trace that is being written, such as at the end of training."""
        if self._writing is not None:
            self._writing.join()

    def _write(self, profiler: profile, done: int, first: int) -> None:
        path = self._folder / f"step-{first}.rank-{self._rank}.json.gz"
        draft = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(draft))
            draft.replace(path)
        except Exception as error:  # the profiler's errors, or a full disk
            with suppress(OSError):
                draft.unlink()
            logger.warning("%s: the trace cannot be written: %s", path, error)
            return
        if self._rank == 0:
            logger.info("traced step %d to %d: %s, and a file beside it for each other rank", first, done, path)
