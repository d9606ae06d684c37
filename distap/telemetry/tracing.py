"""Trace a step with torch's profiler, as SIGUSR1 asks for.

Every rank writes `step-S.rank-R.json.gz`, which Perfetto (ui.perfetto.dev) and chrome://tracing
show. The stages appear in it under their names, and each `[memory]` event has the bytes that a
device has allocated since. Errors of the profiler never end the training.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from distap.errors import logger


@contextmanager
def traced(folder: Path, rank: int, step: int) -> Iterator[None]:
    """Trace the enclosed step, counted from 1, of this rank; write the trace into `folder`."""
    # The profiler's library would print its begin and end, and an error if there is no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(
        activities=[ProfilerActivity.CPU, *gpu], acc_events=True, profile_memory=True
    )
    with _surviving(rank, step):
        profiler.start()
    yield
    path = folder / f"step-{step}.rank-{rank}.json.gz"
    with _surviving(rank, step):
        profiler.add_metadata_json("distap", json.dumps({"rank": rank, "step": step}))
        profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        if rank == 0:
            logger.info("traced step %d: %s, and a file next to it for each other rank", step, path)


@contextmanager
def _surviving(rank: int, step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the profiler's errors, or a full disk
        logger.warning("rank %d has no trace of step %d: %s", rank, step, error)
