"""Measure readers of a store in turns: images a second, and what the store was asked for."""

import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.store.options import StoreOptions
from benchmarks.store.readers import (
    PREFETCH,
    SHUFFLE_BUFFER,
    STREAMING,
    WEBDATASET,
    Place,
    Reader,
    readers,
)
from benchmarks.store.shards import CLASS_SIZE, INSTALL, MIXED, Filled, fill
from benchmarks.store_server import RunningStore, running_store
from distap.telemetry.terminal import track

CEILING_SECONDS = 2.0
CEILING_CLIENTS = 4
CAPTION = (
    "requests, KB: that the store answered, an image. start: seconds to the first images, which do"
    " not count. of {first:g} ms: of the reader's rate when"
    " the store answers after {first:g} ms. {others}: how many times the rate of each this"
    " is. Medians over {rounds} rounds, in which all readers take turns. Images of {kilobytes:.0f}"
    " KB, {images} of a shard, {class_size} of a class. one by one: distap with data.requests=1."
    " at once: with its default. by place: shards that keep a class together; the others are in"
    " random order. window: by place, with sampling.window={window}; cache: with"
    " data.cache too, for {cache:.0%} of the data set. WebDataset: through a buffer"
    " of {buffer} images, which it still fills. streaming: shuffles within blocks of {window}"
    " shards. All decode and crop by distap's transform."
)
HEADINGS = ("workers", "ms", "reader", "images/s", "requests", "KB", "start")


class Turn(NamedTuple):
    """What a reader did in its turn."""

    rate: float  # images a second
    requests: float  # an image
    kilobytes: float  # an image
    first: float  # seconds from its start to its first images


Key = tuple[int, float, str]  # workers, delay in milliseconds, reader


def store_report(options: StoreOptions, workers: int, rounds: int) -> harness.Report:
    """Measure each reader at each delay with one worker, and with so many."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distap-bench-")))
        filled = fill(folder, options)
        stores = {
            delay: stack.enter_context(running_store(filled.folder, delay, options.bandwidth))
            for delay in options.delay
        }
        note = _ceiling(filled, options)
        turns = _take_turns(options, filled, stores, workers, rounds)
    missing = [name for name, reader in readers(options, filled).items() if reader is None]
    rows = [_row(key, turns, options) for key in turns]
    notes = [note]
    notes += [f"{name}: not installed; {INSTALL}, then --streaming FOLDER" for name in missing]
    caption = CAPTION.format(
        first=options.delay[0],
        others=", ".join(_others(turns)),
        rounds=rounds,
        kilobytes=filled.image_bytes / options.store_images / 1000,
        images=options.images_per_shard,
        class_size=CLASS_SIZE,
        window=options.window,
        cache=options.cache,
        buffer=SHUFFLE_BUFFER,
    )
    headings = [*HEADINGS, f"of {options.delay[0]:g} ms", *_others(turns)]
    cells = list(_cells(rows, missing))
    return harness.Report(
        rows,
        [harness.FiguresTable("images a second from a store", caption, headings, cells)],
        notes,
    )


def _take_turns(
    options: StoreOptions,
    filled: Filled,
    stores: dict[float, RunningStore],
    workers: int,
    rounds: int,
) -> dict[Key, list[Turn]]:
    installed = {name: read for name, read in readers(options, filled).items() if read is not None}
    turns: dict[Key, list[Turn]] = {
        (count, delay, name): []
        for count in sorted({1, workers})
        for delay in options.delay
        for name in installed
    }
    order = harness.order_of_turns(list(turns), rounds)
    for count, delay, name in track(order, "reading", len(order)):
        turn = _turn(installed[name], stores[delay], count, options)
        turns[count, delay, name].append(turn)
    return turns


def _turn(reader: Reader, store: RunningStore, workers: int, options: StoreOptions) -> Turn:
    """Measure an endless reader once its workers have read ahead, for a pass at most."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distap-bench-"))
        opened = time.perf_counter()
        place = Place(store.url, workers, Path(folder))
        chunks = stack.enter_context(closing(_generator(reader(place))))
        early = len(next(chunks))
        first = time.perf_counter() - opened
        for _ in range(workers * PREFETCH - 1):
            early += len(next(chunks))
        before = store.counters()
        started = time.perf_counter()
        count = 0
        spent = 0.0
        while spent < options.seconds and count < max(1, options.store_images - early):
            count += len(next(chunks))
            spent = time.perf_counter() - started
        asked = store.counters() - before
    return Turn(count / spent, asked["requests"] / count, asked["bytes"] / count / 1000, first)


def _generator(chunks: Iterator[Tensor]) -> Generator[Tensor]:
    """Pass chunks on, from what may have no `close`."""
    yield from chunks


def _ceiling(filled: Filled, options: StoreOptions) -> str:
    """Measure the store itself: ranges of an image's size, without delay and limit."""
    size = filled.image_bytes // options.store_images
    shard = f"/{MIXED}/{filled.shards[MIXED][0]}"
    end = time.perf_counter() + CEILING_SECONDS
    answers = Counter[int]()

    def ask(client: int, port: int) -> None:
        request = f"GET {shard} HTTP/1.1\r\nRange: bytes=0-{size - 1}\r\n\r\n".encode()
        buffer = memoryview(bytearray(size))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while time.perf_counter() < end:
                connection.sendall(request)
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(1024)
                remaining = size - len(head.partition(b"\r\n\r\n")[2])
                while remaining:
                    remaining -= connection.recv_into(buffer, remaining)
                answers[client] += 1

    with running_store(filled.folder) as store:
        end = time.perf_counter() + CEILING_SECONDS
        clients = [
            threading.Thread(target=ask, args=(client, store.port))
            for client in range(CEILING_CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    rate = answers.total() / CEILING_SECONDS
    return (
        f"The store itself, without delay and limit: {rate:,.0f} answers of {size / 1000:.0f} KB a"
        f" second, {rate * size / 1e6:,.0f} MB. Its limit here: {options.bandwidth / 1e6:,.0f} MB a"
        " second."
    )


def _others(turns: dict[Key, list[Turn]]) -> list[str]:
    names = {name for _, _, name in turns}
    return [name for name in (WEBDATASET, STREAMING) if name in names]


def _row(key: Key, turns: dict[Key, list[Turn]], options: StoreOptions) -> harness.Row:
    workers, delay, name = key
    rates = [turn.rate for turn in turns[key]]

    def times(other: Key) -> float:
        return harness.median_ratio(rates, [turn.rate for turn in turns[other]])

    return {
        "workers": workers,
        "delay": delay,
        "reader": name,
        "images_per_second": statistics.median(rates),
        "rates": rates,
        "requests": statistics.median(turn.requests for turn in turns[key]),
        "kilobytes": statistics.median(turn.kilobytes for turn in turns[key]),
        "first_seconds": statistics.median(turn.first for turn in turns[key]),
        "of_first": times((workers, options.delay[0], name)),
        "times": {other: times((workers, delay, other)) for other in _others(turns)},
    }


def _cells(rows: list[harness.Row], missing: list[str]) -> Iterator[list[str]]:
    place: tuple[int, float] | None = None
    for row in rows:
        is_first = place != (row["workers"], row["delay"])
        place = (row["workers"], row["delay"])
        yield [
            str(row["workers"]) if is_first else "",
            f"{row['delay']:g}" if is_first else "",
            row["reader"],
            f"{row['images_per_second']:,.0f}",
            f"{row['requests']:.3f}",
            f"{row['kilobytes']:,.0f}",
            f"{row['first_seconds']:.1f}",
            f"{row['of_first']:.2f}",
            *(f"{ratio:.2f}x" for ratio in row["times"].values()),
        ]
    for name in missing:
        yield ["", "", name, "not installed", *[""] * 4, *("" for _ in rows[0]["times"])]
