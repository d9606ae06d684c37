"""Trace the next steps on demand with torch's profiler.

Every rank writes `step-S.rank-R.json.gz`, which Perfetto (ui.perfetto.dev) and chrome://tracing show. The stages
appear in it under their names. Errors of the profiler never end the training.
"""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from torch.profiler import profile

STEPS, MOST_STEPS = 1, 20  # one step of thousands of images makes a large file already
QUIET = "99"
logger = logging.getLogger("distap")


class Tracer:
    """Traces one rank's steps into a folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._asked = self._agreed = 0  # numbers of steps: asked of this rank, agreed on by all
        self._profiler: profile | None = None
        self._first = self._last = 0  # step of the trace, the same on all ranks

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
            profiler = profile(acc_events=True)
            profiler.start()
        except Exception as error:
            logger.warning("rank %d does not trace step %d to %d: %s", self._rank, self._first, self._last, error)
            return
        self._profiler = profiler
        if self._rank == 0:
            logger.info("tracing step %d to %d", self._first, self._last)

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
        """Write a trace if one is under way, such as at the end of training."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        path = self._folder / f"step-{self._first}.rank-{self._rank}.json.gz"
        draft = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.add_metadata_json("distap", json.dumps({"rank": self._rank, "steps": [self._first, done]}))
            profiler.export_chrome_trace(str(draft))
            draft.replace(path)
        except Exception as error:  # the profiler's errors, or a full disk
            with suppress(OSError):
                draft.unlink()
            logger.warning("%s: the trace cannot be written: %s", path, error)
            return
        if self._rank == 0:
            logger.info("traced step %d to %d: %s, and a file beside it for each other rank", self._first, done, path)
