"""Predict what the images of an epoch cost a store: requests, and the bytes that leave it.

The batches are those of the training, since its plan is a function of the index. Bytes and requests
are counted as the loader sends them: neighbours share a request, whole shards fill a cache.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from distap.config.recipe import Recipe
from distap.data.loading.reader import ImageSet
from distap.data.plan import Plan
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.randomness import Numbers
from distap.storage.files import COALESCED, REQUEST_BYTES
from distap.storage.ranges import coalesced
from distap.telemetry.terminal import text_table, track

SAMPLED_STEPS = 12  # of an epoch, whose requests are counted
CAPTION = (
    "Of the training images' store, in the first epoch. times: bytes that leave the store, divided"
    " by those of the shards. later: the same in later epochs."
)


@dataclass(frozen=True)
class Prices:
    """What a store bills, in any currency."""

    gigabyte: float = 0.0  # that leaves the store
    thousand_requests: float = 0.0


class _Cache:
    """The shards on a host's disk, of which the one that was used longest ago goes first.

    In windows of shards this is the one whose next use lies farthest ahead, or nearly.
    """

    def __init__(self, limit: int, sizes: Numbers) -> None:
        self._limit = limit
        self._sizes = sizes
        self._shards = OrderedDict[int, int]()
        self._held = 0

    def use(self, shard: int) -> int:
        """Return the bytes to fetch for a shard, 0 if it is here."""
        if shard in self._shards:
            self._shards.move_to_end(shard)
            return 0
        size = int(self._sizes[shard])
        self._shards[shard] = size
        self._held += size
        while self._held > self._limit:
            _, gone = self._shards.popitem(last=False)
            self._held -= gone
        return size

    def __contains__(self, shard: int) -> bool:
        return shard in self._shards


def store_costs(
    recipe: Recipe, gpus: Sequence[int], gpus_a_host: int, prices: Prices
) -> list[dict[str, Any]]:
    """Return for each number of GPUs the requests, bytes and costs of an epoch.

    Raises:
        DistapError: the training images are not in shards with an index.
    """
    source = recipe.data.train_source
    if source.kind != "shards":
        raise DistapError(
            "data.no_shards", f"{source}: what images cost a store is predicted for shards alone"
        )
    images = ImageSet(source, load_index(source, compare=False))
    plan = Plan(images.index.classes, recipe.sampling, recipe.seed)
    return [
        _costs(recipe, images, plan, ranks, gpus_a_host, prices)
        for ranks in track(gpus, "counting requests", len(gpus))
    ]


def store_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of `store_costs`."""
    cells = [
        [
            f"{row['gpus']:,}",
            f"{row['hosts']:,}",
            f"{row['requests']:,.0f}",
            f"{row['requests_an_image']:.3f}",
            f"{row['bytes'] / 1e9:,.2f}",
            f"{row['times']:.2f}",
            f"{row['later_times']:.2f}",
            f"{row['cost']:,.2f}",
        ]
        for row in rows
    ]
    headings = ["GPUs", "hosts", "requests", "an image", "GB", "times", "later", "cost"]
    return text_table("an epoch of the store", CAPTION, headings, cells)


def _costs(
    recipe: Recipe, images: ImageSet, plan: Plan, ranks: int, gpus_a_host: int, prices: Prices
) -> dict[str, Any]:
    steps = max(1, round(len(images) / plan.sampling.size))
    hosts = -(-ranks // gpus_a_host)
    sizes = images.index.shard_size
    caches = list[_Cache]()
    if recipe.data.cache is not None:
        caches = [_Cache(recipe.data.cache.bytes, sizes) for _ in range(hosts)]
    reading = _Reading(images, plan, ranks, gpus_a_host, recipe.replay.size, caches)
    first = reading.epoch(range(steps))
    later = reading.epoch(range(steps, 2 * steps)) if caches else first
    total = int(sizes.sum())
    return {
        "gpus": ranks,
        "hosts": hosts,
        "steps": steps,
        "requests": first["requests"],
        "requests_an_image": first["requests"] / (steps * plan.sampling.size),
        "bytes": first["bytes"],
        "times": first["bytes"] / total,
        "later_times": later["bytes"] / total,
        "cost": first["bytes"] / 1e9 * prices.gigabyte
        + first["requests"] / 1000 * prices.thousand_requests,
    }


@dataclass(frozen=True)
class _Reading:
    """How ranks read the images of steps."""

    images: ImageSet
    plan: Plan
    ranks: int
    gpus_a_host: int
    chunk: int  # images that a loader worker asks for at once
    caches: Sequence[_Cache]  # of the hosts; none without caches

    def epoch(self, steps: range) -> Counter[str]:
        """Count whole shards in all steps, and images that are read alone in some of them."""
        counts = Counter[str]()
        sampled = np.linspace(steps.start, steps.stop - 1, SAMPLED_STEPS).astype(int)
        is_sampled = set(sampled.tolist())
        for step in steps if self.caches else sorted(is_sampled):
            alone = self._fetched(step, counts)
            if step in is_sampled:
                for samples in alone:
                    for name, amount in self._requested(samples).items():
                        counts[name] += round(amount * len(steps) / len(is_sampled))
        return counts

    def _fetched(self, step: int, counts: Counter[str]) -> list[Numbers]:
        """Count the shards to fetch for a step; return the samples that each rank reads alone."""
        batch = self.plan.batch(step)
        order = self.plan.order(step, self.ranks)
        samples = batch if order is None else batch[order]
        shards = self.images.index.shard[samples]
        place = (self.plan.spread(step)[shards] * self.ranks).astype(int)
        keeper = np.minimum(place, self.ranks - 1) // self.gpus_a_host
        is_alone = np.ones(len(samples), dtype=bool)
        for row, shard in enumerate(shards.tolist() if self.caches else []):
            reader = row % self.ranks // self.gpus_a_host
            if keeper[row] == reader:
                size = self.caches[reader].use(shard)
                counts["bytes"] += size
                counts["requests"] += -(-size // REQUEST_BYTES)
            is_alone[row] = shard not in self.caches[reader]
        return [
            samples[rank :: self.ranks][is_alone[rank :: self.ranks]] for rank in range(self.ranks)
        ]

    def _requested(self, samples: Numbers) -> Counter[str]:
        counts = Counter[str]()
        for start in range(0, len(samples), self.chunk):
            part = samples[start : start + self.chunk].tolist()
            ranges = [self.images.range(sample) for sample in part]
            requests = coalesced(ranges, COALESCED, REQUEST_BYTES)
            counts["requests"] += len(requests)
            counts["bytes"] += sum(request.range.size for request in requests)
        return counts
