"""Trace the next step on SIGUSR1 with torch's profiler.

Every rank writes `step-S.rank-R.json.gz`, which Perfetto (ui.perfetto.dev) and chrome://tracing show. The stages
appear in it under their names. Errors of the profiler never end the training.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

KINETO_QUIET = "99"
logger = logging.getLogger("distap")


class Tracer:
    """Trace steps of one rank into a folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._asked = False
        self._profiler: profile | None = None

    def ask(self) -> None:
        """Request a trace of the next step, from any thread; the ranks then agree on it."""
        self._asked = True

    def asked(self) -> bool:
        """Return whether a trace was requested on this rank since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def begin(self, step: int) -> None:
        """Start a trace of this step, counted from 1, on which the ranks have agreed."""
        # The profiler's library would print its begin and end, and an error if there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_QUIET)
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with self._surviving(step):
            profiler = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            profiler.start()
            self._profiler = profiler

    def step_done(self, step: int) -> None:
        """Write the trace of a step, if there is one."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        path = self._folder / f"step-{step}.rank-{self._rank}.json.gz"
        draft = path.with_name(f".{os.getpid()}.{path.name}")
        with self._surviving(step):
            profiler.add_metadata_json("distap", json.dumps({"rank": self._rank, "step": step}))
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(draft))
            draft.replace(path)
            if self._rank == 0:
                logger.info("traced step %d: %s, and a file next to it for each other rank", step, path)

    @contextmanager
    def _surviving(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the profiler's errors, or a full disk
            logger.warning("rank %d has no trace of step %d: %s", self._rank, step, error)
