"""Read images by their offset in a data set's shards."""

import zlib
from pathlib import Path

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, EncodedImage
from distap.data.loading.shard_cache import ShardCache
from distap.data.settings import CacheSettings
from distap.data.shards.index import Index
from distap.storage.files import storage_of
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings
from distap.storage.traffic import Traffic


class Reader:
    """Images of a data set, each by one positioned read; safe to copy into loader workers.

    Args:
        source: of the shards.
        index: of the same data set.
        max_pixels: images with more pixels (width times height) are refused without decoding.
        remote: how a remote source is reached, and how often reading is tried.
        cache: where shards are kept on this host's disk; none reads each image from its source.
    Raises:
        DistapError: the cache's folder cannot be used.
    """

    def __init__(
        self,
        source: Source | Path | str,
        index: Index,
        max_pixels: int = MAX_PIXELS,
        remote: RemoteSettings | None = None,
        cache: CacheSettings | None = None,
    ) -> None:
        self.source = parse_source(source)
        self.index = index
        self.max_pixels = max_pixels
        remote = remote or RemoteSettings()
        self.storage = storage_of(self.source.base, remote)
        self.cache = ShardCache(cache, index, self.source.base, remote, self.storage.meter) if cache else None

    def encoded(self, sample: int) -> EncodedImage:
        """The image before it is decoded.

        Raises:
            DamagedImageError: its bytes have changed since they were indexed, or are no image.
            DistapError: the shard cannot be read at all.
        """
        return EncodedImage(self.data(sample), self.max_pixels, self.where(sample))

    def data(self, sample: int) -> bytes:
        """The image's encoded bytes, checked against the index."""
        index = self.index
        shard, offset, size = int(index.shard[sample]), int(index.offset[sample]), int(index.size[sample])
        if self.cache is not None:
            kept = self.cache.read(shard, offset, size)
            if kept is not None and not self._damage(sample, kept):
                self.storage.meter.add(Traffic(read_bytes=size, cache_hits=1))
                return kept
            if kept is not None:
                self.cache.drop(shard)
            self.storage.meter.add(Traffic(cache_misses=1))
        data = self.storage.read(str(index.shard_name[shard]), offset, size)
        if self._damage(sample, data) and self.source.scheme:
            # A network may have changed the bytes on their way: read them once more.
            self.storage.meter.add(Traffic(retries=1))
            data = self.storage.read(str(index.shard_name[shard]), offset, size)
        if damage := self._damage(sample, data):
            raise damage
        return data

    def take_traffic(self) -> Traffic:
        """The traffic of this process since the last call."""
        return self.storage.meter.take()

    def where(self, sample: int) -> str:
        """Shard and key of a sample, for messages."""
        shard, key = self.index.shard_name[self.index.shard[sample]], self.index.key[sample]
        return key if self.source.is_folder_of_images else f"{shard}:{key}"

    def _damage(self, sample: int, data: bytes) -> DamagedImageError | None:
        size = int(self.index.size[sample])
        if len(data) < size:
            return DamagedImageError("truncated", f"{len(data)} bytes of {size}")
        if int(self.index.crc32[sample]) not in (0, zlib.crc32(data)):
            return DamagedImageError("crc_mismatch", "the bytes have changed since they were indexed")
        return None
