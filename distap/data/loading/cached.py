"""Keep the shards that this host reads on its disk, fetched ahead in the order of the plan."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from distap.data.joined import MixedImages
from distap.data.loading.reader import ImageBytes, ImageSet
from distap.data.plan import Classes, Plan
from distap.errors import DistapError, logger
from distap.randomness import Numbers
from distap.storage.cache import CacheSettings, FileCache
from distap.world import World


class CachedShards:
    """The shards of which this host takes most images in a step, on its disk.

    The ranks take the images of a batch in order of their place, so each shard belongs to the host
    within whose share of the places its middle lies. The few images of other hosts' shards are read
    from the store alone.

    Raises:
        DistapError: they do not fit into the cache, or the cache cannot be used.
    """

    def __init__(
        self,
        settings: CacheSettings,
        images: ImageSet | MixedImages,
        plan: Plan,
        world: World,
        read_ahead: int = 0,
    ) -> None:
        self.images = images
        self.plan = plan
        # by number
        self._shards = [images.shard(number) for number in range(images.shards)]
        self.sizes = np.array([shard.size for shard in self._shards])
        # Without a collective: rank 0 opens the images before the other ranks.
        first = world.rank - world.local_rank
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        last = min(first + local_ranks, world.size)
        self._hosts = -(-world.size // (last - first))
        self._of_host = np.array([first, last]) / world.size
        self._of_rank = np.array([world.rank, world.rank + 1]) / world.size
        # images that the workers of a host may have read ahead of the step that is trained
        self._images_ahead = (last - first) * read_ahead
        self._require_room(settings)
        self.cache = FileCache(settings.folder, settings.bytes)

    def shards(self, step: int, of_rank: bool = False) -> NDArray[np.bool_]:
        """Return (S,) the shards that this host keeps for a step, or that this rank fetches."""
        return _within(self.plan, step, *(self._of_rank if of_rank else self._of_host))

    def files(self, step: int, samples: Sequence[int], requests: int) -> list[ImageBytes]:
        """Return the bytes of images from the disk if they are there; see `ImageSet.files`."""
        images = self.images
        numbers = self.plan.classes.shards_of(np.array(samples)).tolist()
        is_kept = self.shards(step)
        # Other hosts' shards may be here too, from a pass in which they were this host's.
        opened = {number: self._opened(number, bool(is_kept[number])) for number in set(numbers)}
        files: list[ImageBytes | None] = [None] * len(samples)
        for row, (sample, number) in enumerate(zip(samples, numbers, strict=True)):
            shard = opened.get(number)
            if shard is not None:
                files[row] = self._read(sample, number, shard)
        for shard in filter(None, opened.values()):
            shard.close()
        missing = [row for row, file in enumerate(files) if file is None]
        storage = self._shards[numbers[0]].storage
        storage.count(cache_hits=len(files) - len(missing), cache_misses=len(missing))
        from_store = images.files([samples[row] for row in missing], requests)
        for row, file in zip(missing, from_store, strict=True):
            files[row] = file
        return [file for file in files if file is not None]

    def _read(self, sample: int, number: int, shard: BinaryIO) -> bytes | None:
        """Read an image from the disk; drop the shard, and return None, if the bytes are others."""
        place = self.images.range(sample)
        data = b""
        with suppress(OSError):  # of a disk that fails
            data = os.pread(shard.fileno(), place.size, place.offset)
        if self.images.damage(sample, data) is None:
            return data
        logger.warning(
            "data.cache.folder: %s: %s has changed on this host's disk; it is fetched again",
            self.cache.folder,
            place.name,
        )
        self.cache.discard(self._shards[number].sha256, shard)
        return None

    def is_here(self, shard: int) -> bool:
        return self.cache.has(self._shards[shard].sha256)

    def fetch(self, number: int) -> bool:
        """Fetch a shard, by its number, unless it is here; return whether it is."""
        shard = self._shards[number]
        blocks = partial(shard.storage.blocks, shard.name, shard.size)
        return self.cache.fetch(shard.sha256, shard.size, blocks, shard.name)

    def want(self, numbers: Sequence[int]) -> None:
        """Say which shards are wanted next, in this order."""
        self.cache.want([self._shards[number].sha256 for number in numbers])

    def _opened(self, number: int, fetches: bool) -> BinaryIO | None:
        shard = self._shards[number]
        file = self.cache.open(shard.sha256)
        if file is None and fetches:
            started = time.perf_counter()
            self.fetch(number)
            waited = time.perf_counter() - started
            shard.storage.count(cache_wait_ms=round(1000 * waited))
            file = self.cache.open(shard.sha256)
        return file

    def _require_room(self, settings: CacheSettings) -> None:
        window = getattr(self.plan.sampling, "window", None)
        if window is None:
            shards = [self._shards[number] for number in np.flatnonzero(self.shards(0)).tolist()]
            # Parts of one data set share shards.
            needed = sum({shard.sha256: shard.size for shard in shards}.values())
            remedy = "draw from windows of shards (sampling.window)"
        else:
            needed = sum(
                self._of_windows(window, classes, self.sizes[first : first + len(classes.spread)])
                for first, classes in self.plan.classes.parts
            )
            remedy = "use a smaller sampling.window, or smaller shards"
        if needed > settings.bytes:
            raise DistapError(
                "data.cache_too_small",
                f"data.cache.bytes is {settings.bytes:,}, but the batches of this host draw from"
                f" shards of {needed:,} bytes of {self.images.name} at a time: set it to"
                f" {needed:,} or more, or {remedy}",
            )

    def _of_windows(self, window: int, classes: Classes, sizes: Numbers) -> int:
        """Return the bytes of a set's shards that this host needs at a time."""
        # A batch lies across two windows at most, workers are ahead of it, and the next shard is on
        # its way.
        ahead = -(-self._images_ahead * len(sizes) // len(classes))
        shards = 2 * -(-window // self._hosts) + ahead + 1
        return min(int(shards * sizes.max()), int(sizes.sum()))


@lru_cache(maxsize=64)
def _within(plan: Plan, step: int, low: float, high: float) -> NDArray[np.bool_]:
    spread = plan.spread(step)
    return (spread >= low) & (spread < high)
