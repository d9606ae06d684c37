"""Bytes that leave a store for each pass of several hosts, as ranks with a folder each.

python -m benchmarks data --store --hosts 2
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import harness
from benchmarks.store.options import IMAGES_A_CLASS, StoreOptions
from benchmarks.store.readers import loading_job
from benchmarks.store.shards import BY_CLASS, CLASS_SIZE, MIXED, Filled, fill
from benchmarks.store_server import RunningStore, running_store
from distap.data.loading.indexed import IndexedSource
from distap.stopwatch import Stopwatch
from distap.storage.cache import CacheSettings
from distap.telemetry.terminal import track
from distap.world import World

PASSES = 3
CAPTION = (
    "Bytes that the store sends in each pass over the classes, over those of the data set"
    " ({total:,.0f} MB); goal: at most 1.1. {hosts} hosts with a rank each. Batches take {images}"
    " of the {class_size} images of a class, so that these images alone are {read:.2f}. windows: of"
    " {window} shards, of {shards}."
)


class HostReads(StoreOptions):
    """One of several hosts that read the same passes; rank 0 counts what the store sends."""

    name: ClassVar[str] = "hosts of a store"
    url: str = ""
    shards: str = BY_CLASS
    windowed: bool = False
    cache_folder: Path | None = None
    cache_bytes: int = 0  # of each host

    def on_rank(self, world: World) -> list[int]:
        """Return the bytes of each pass."""
        torch.set_num_threads(1)
        store = RunningStore(int(self.url.rpartition(":")[2]))
        window = self.window if self.windowed else None
        cache = None
        if self.cache_folder is not None:
            cache = CacheSettings(self.cache_folder / str(world.rank), self.cache_bytes)
        job = loading_job(self, f"{self.url}/{self.shards}", 1, window, cache=cache)
        images = IndexedSource().open(job, world, Stopwatch())
        steps = max(1, len(images.plan.classes.parts[0][1].with_pairs) // self.batch_classes)
        world.barrier()
        before = store.counters()["bytes"]
        spent = []
        for share in images.shares(range(PASSES * steps)):
            for start in range(0, len(share.samples), self.chunk):
                share.images(slice(start, min(start + self.chunk, len(share.samples))))
            if (share.step + 1) % steps == 0:
                world.barrier()  # all hosts have read this pass, and ahead of it
                after = store.counters()["bytes"]
                spent.append(after - before)
                before = after
        return spent


def hosts_report(options: StoreOptions) -> harness.Report:
    """Count the bytes of each pass."""
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory(prefix="distap-bench-") as temporary:
        folder = Path(temporary)
        filled = fill(folder, options)
        ways = _ways(options, filled, folder)
        for name, way in track(ways.items(), "reading on hosts", len(ways)):
            with running_store(filled.folder, options.delay[0], options.bandwidth) as store:
                settings = options.model_dump(include=set(StoreOptions.model_fields))
                reads = HostReads(**settings | way, url=store.url)
                spent = bytes_of_passes(reads, options.hosts)
            shares = [count / filled.shard_bytes for count in spent]
            rows.append({"way": name, "passes": shares, "mean": sum(shares) / len(shares)})
    caption = CAPTION.format(
        total=filled.shard_bytes / 1e6,
        hosts=options.hosts,
        images=IMAGES_A_CLASS,
        class_size=CLASS_SIZE,
        read=IMAGES_A_CLASS / CLASS_SIZE,
        window=options.window,
        shards=len(filled.shards[BY_CLASS]),
    )
    headings = ["reading", *(f"pass {number}" for number in range(1, PASSES + 1)), "mean"]
    cells = [
        [row["way"], *(f"{share:.2f}" for share in row["passes"]), f"{row['mean']:.2f}"]
        for row in rows
    ]
    return harness.Report(rows, [harness.FiguresTable("bytes of a pass", caption, headings, cells)])


def _ways(options: StoreOptions, filled: Filled, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the fields of HostReads for each way of reading, with new caches."""
    share = options.cache / options.hosts
    windows = {"windowed": True}
    part = {"cache_folder": folder / "part", "cache_bytes": int(share * filled.shard_bytes)}
    whole = {"cache_folder": folder / "whole", "cache_bytes": 2 * filled.shard_bytes}
    return {
        "images in random order": {"shards": MIXED},
        "classes together": {},
        "windows": windows,
        f"windows, a cache of {share:.0%} on each host": windows | part,
        "windows, a cache of everything on each host": windows | whole,
        "a cache of everything on each host": {**whole, "cache_folder": folder / "alone"},
    }


def bytes_of_passes(reads: HostReads, hosts: int) -> list[int]:
    """Return what the store at `reads.url` sends in each pass of several hosts.

    The hosts are processes with a rank each, which share this machine alone.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.store.hosts", reads.model_dump_json()]
    processes = []
    for rank in range(hosts):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(command, env=os.environ | environment, **harness.worker_pipes())
        )
    try:
        output = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    status = max(abs(process.returncode) for process in processes)
    spent: list[int] = harness.worker_result(reads, output[0], status)
    return spent


if __name__ == "__main__":
    harness.work(HostReads.model_validate_json(sys.argv[1]))
