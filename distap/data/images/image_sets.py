"""Images to be described, whatever they lie in: shards with an index, or a plain folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import MAX_PIXELS
from distap.data.images.folders import ImageFolder, list_folder
from distap.data.loading.reading import Reader
from distap.data.loading.shard_cache import CacheSettings
from distap.data.shards.index import load_index
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings


@dataclass(frozen=True)
class ImageSet:
    """N images in order, what they are called, and what reads them."""

    name: str  # as it was given
    fingerprint: str  # two with the same one are the same
    keys: NDArray[np.str_]  # (N,) name of each, unlike all others
    classes: NDArray[np.str_]  # (N,) name of its class, "" for none
    reader: Reader | ImageFolder
    left_out: tuple[tuple[str, str], ...] = ()  # what is no part of it from the start, and why

    def __len__(self) -> int:
        """Number of images."""
        return len(self.keys)

    def sizes(self, samples: Sequence[int]) -> NDArray[np.int64]:
        """(n, 2) width and height in pixels, as far as headers tell: to plan with, not to rely on.

        Those of shards are as stored, which EXIF may turn; (0, 0) is unknown.
        """
        if isinstance(self.reader, Reader):
            index, rows = self.reader.index, np.asarray(samples, dtype=np.int64)
            return np.stack([index.width[rows], index.height[rows]], axis=1).astype(np.int64)
        return np.array([self.reader.size(sample) for sample in samples], dtype=np.int64).reshape(-1, 2)


def open_images(
    source: Source | Path | str,
    max_pixels: int = MAX_PIXELS,
    remote: RemoteSettings | None = None,
    cache: CacheSettings | None = None,
) -> ImageSet:
    """The images of shards, or of a local folder that has neither an index nor shards in it.

    Args:
        source: of the shards, or the folder.
        max_pixels: larger images are left out.
        remote: how a remote source is reached.
        cache: where shards are kept on this host's disk.
    Raises:
        DistapError: there is no such data set, it is empty, or its index is missing or wrong.
    """
    source = parse_source(source)
    if _is_plain(source):
        images = list_folder(Path(source.base), max_pixels)
        keys, none = np.array(images.names, dtype=np.str_), np.zeros(len(images), dtype="<U1")
        return ImageSet(str(source), images.fingerprint, keys, none, images, images.left_out)
    index = load_index(source, remote)
    keys = index.key
    if len(np.unique(keys)) < len(keys):  # each shard of other makers may count from 0
        shards = index.shard_name[index.shard].tolist()
        keys = np.array([f"{shard}:{key}" for shard, key in zip(shards, keys.tolist(), strict=True)])
    reader = Reader(source, index, max_pixels, remote, cache)
    return ImageSet(str(source), index.fingerprint, keys, index.class_name[index.label], reader)


def _is_plain(source: Source) -> bool:
    folder = Path(source.base)
    if source.scheme or source.pattern is not None or source.kept_index is not None or not folder.is_dir():
        return False
    return not Path(source.index).exists() and next(folder.glob("*.tar"), None) is None
