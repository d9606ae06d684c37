"""Images to describe or search, in order: from shards with an index, or from a plain folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import MAX_PIXELS
from distap.data.loading.indexed import Reader
from distap.data.shards.image_folders import Skipped
from distap.data.shards.load_index import index_of_folder, load_index
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings


@dataclass(frozen=True)
class ImageSet:
    """N images in order, with their names and their reader."""

    name: str  # as it was given
    fingerprint: str  # identifies the images
    keys: NDArray[np.str_]  # (N,) name of each, unlike all others
    classes: NDArray[np.str_]  # (N,) name of its class, "" for none
    reader: Reader
    left_out: tuple[Skipped, ...] = ()  # files that are not read, and why

    def __len__(self) -> int:
        return len(self.keys)

    def sizes(self, samples: Sequence[int]) -> NDArray[np.int64]:
        """Read (n, 2) width and height in pixels from headers; they may be wrong and serve planning only.

        Those of shards are as stored, before EXIF's orientation; (0, 0) is unknown.
        """
        if self.reader.source.kind == "shards":
            index, rows = self.reader.index, np.asarray(samples, dtype=np.int64)
            return np.stack([index.width[rows], index.height[rows]], axis=1).astype(np.int64)
        return np.array([self.reader.size(sample) for sample in samples], dtype=np.int64).reshape(-1, 2)


def open_images(
    source: Source | Path | str,
    max_pixels: int = MAX_PIXELS,
    remote: RemoteSettings | None = None,
) -> ImageSet:
    """Open the images of shards (see `Reader`), or of a local folder without index and shards."""
    source = parse_source(source)
    if _is_plain(source):
        index, source = index_of_folder(source, labelled=False), replace(source, kind="imagefolder")
    else:
        index = load_index(source, remote)
    keys = index.names
    if len(np.unique(keys)) < len(keys):  # each shard of other makers may count from 0
        shards = index.shard_name[index.shard].tolist()
        keys = np.array([f"{shard}:{key}" for shard, key in zip(shards, index.key.tolist(), strict=True)])
    reader = Reader(source, index, max_pixels, remote)
    return ImageSet(str(source), index.fingerprint, keys, index.class_name[index.label], reader, index.left_out)


def _is_plain(source: Source) -> bool:
    folder = Path(source.base)
    is_named = source.pattern is not None or source.kept_index is not None or source.kind != "shards"
    if source.scheme or is_named or not folder.is_dir():
        return False
    return not Path(source.index).exists() and next(folder.glob("*.tar"), None) is None
