"""`python -m benchmarks index`: update an index of many descriptors, beside building it anew."""

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any

import numpy as np
import typer

from distap.errors import DistapError
from distap.retrieval.changing import changed_index
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet
from distap.retrieval.generations import updating
from distap.retrieval.indexing import build_index
from distap.retrieval.joining import taken_images
from distap.retrieval.searching import SearchIndex
from distap.retrieval.stored_index import read_index, write_index, write_next
from distap.telemetry.terminal import print_result, text_table

QUERIES = 200
CLUSTERS = 1000
KIND = "Kind of index, as for `distap index`."
SEARCH = "Search parameters of the index."
FOLDER = "New folder for the indexes; it stays."


def index_command(
    images: Annotated[int, typer.Option(help="Descriptors in the index.", min=100)] = 100_000,
    dimensions: Annotated[int, typer.Option(help="Of a descriptor.", min=2)] = 512,
    added: Annotated[int, typer.Option(help="Descriptors that an update adds.", min=1)] = 100,
    removed: Annotated[int, typer.Option(help="Descriptors that it removes.", min=0)] = 1000,
    kind: Annotated[str, typer.Option(help=KIND)] = "flat",
    search: Annotated[str, typer.Option(help=SEARCH)] = "",
    kills: Annotated[int, typer.Option(help="Updates to kill at a random time.", min=0)] = 20,
    folder: Annotated[
        Path | None, typer.Option(help=FOLDER, show_default="a temporary one")
    ] = None,
) -> None:
    """Update an index of drawn descriptors, build it anew, compare the answers, and kill updates.

    Descriptors are given, so no network runs: an update describes only what is new, and an index
    anew needs all of them described.
    """
    place = folder or Path(mkdtemp())
    gallery = _drawn(images + added, dimensions)
    before = _taken(gallery, np.arange(images))
    gone = np.sort(np.random.default_rng(1).permutation(images)[:removed])
    new = _taken(gallery, np.arange(images, images + added))
    remaining = np.setdiff1d(np.arange(images + added), gone)

    rows = list[list[str]]()
    write_index(place / "index", build_index(before, kind, search))
    updated = _timed(rows, "update", lambda: _update(place / "index", gone, new))
    anew = _timed(
        rows,
        "anew",
        lambda: write_index(place / "anew", build_index(_taken(gallery, remaining), kind, search)),
    )
    queries = gallery.descriptors[:: images // QUERIES]
    share = _equal(updated, anew, queries)
    for name, options in (
        ("all", {}),
        ("price<=50", {"where": "price<=50"}),
        ("group", {"group": "product"}),
    ):
        started = time.perf_counter()
        for query in queries:
            updated.search(query, 10, **options)
        milliseconds = 1000 * (time.perf_counter() - started) / len(queries)
        rows.append([f"search: {name}", f"{milliseconds:.2f} ms a query", ""])
    whole = _killed(place / "index", kills, new, gone)
    print_result(
        text_table(
            f"{images:,} x {dimensions}, {kind}: {added} added, {removed} removed",
            f"equal answers: {share:.2%} of {len(queries)} queries. {whole} of {kills} killed"
            " updates left one whole generation.",
            ["", "seconds", "CPU seconds"],
            rows,
        )
    )
    if folder is None:
        shutil.rmtree(place)


def _drawn(images: int, dimensions: int) -> DescriptorSet:
    """Draw descriptors around centres, with a price and a product each."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(CLUSTERS, dimensions)).astype(np.float32)
    labels = generator.integers(0, CLUSTERS, images)
    values = centres[labels] + generator.normal(size=(images, dimensions)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return DescriptorSet(
        values,
        np.array([f"images/{number:09d}.jpg" for number in range(images)]),
        labels.astype(str),
        DescribedBy("drawn", "crop 224"),
        "drawn",
        columns={
            "price": generator.integers(1, 500, images).astype(str),
            "product": (np.arange(images) // 4).astype(str),
        },
        checksums=np.arange(1, images + 1, dtype=np.uint64),
    )


def _taken(images: DescriptorSet, rows: Any) -> DescriptorSet:
    taken = taken_images(images, rows)
    return replace(taken, descriptors=images.descriptors[rows])


def _update(folder: Path, gone: Any, new: DescriptorSet) -> SearchIndex:
    with updating(folder):
        return write_next(folder, changed_index(read_index(folder, changeable=True), gone, new))


def _timed(rows: list[list[str]], name: str, work: Callable[[], SearchIndex]) -> SearchIndex:
    used = _cpu_seconds()
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    rows.append([name, f"{seconds:.2f}", f"{_cpu_seconds() - used:.2f}"])
    return result


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _equal(first: SearchIndex, second: SearchIndex, queries: Any) -> float:
    """Return the share of queries for which two indexes find the same keys."""
    answers = [
        [{hit.key for hit in hits} for hits in index.search(queries, 10)]
        for index in (first, second)
    ]
    return float(np.mean([one == other for one, other in zip(*answers, strict=True)]))


def _killed(folder: Path, kills: int, new: DescriptorSet, gone: Any) -> int:
    """Kill updates, which remove and add the same rows again, and count whole indexes."""
    started = time.perf_counter()
    size = len(_update(folder, np.arange(len(gone)), _renamed(new, "first")))
    longest = time.perf_counter() - started
    whole = 0
    for number in range(kills):
        child = os.fork()
        if child == 0:
            _update(folder, np.arange(len(new)), _renamed(new, f"kill {number}"))
            os._exit(0)
        time.sleep(random.Random(number).uniform(0, 1.2 * longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        try:
            index = read_index(folder)
        except DistapError:
            continue
        whole += len(index) == len(set(index.keys.tolist())) == size
    return whole


def _renamed(images: DescriptorSet, name: str) -> DescriptorSet:
    return replace(images, keys=np.array([f"{name}/{key}" for key in images.keys.tolist()]))
