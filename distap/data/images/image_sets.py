"""Images to describe or search, in order: from shards with an index, or from a plain folder."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import MAX_PIXELS
from distap.data.images.formats import readable_formats
from distap.data.loading.indexed import Reader
from distap.data.pixel_and_cache_settings import CacheSettings
from distap.data.shards.image_folders import Skipped, counted, walk_images
from distap.data.shards.load_index import index_of_files, load_index
from distap.errors import DistapError
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings
from distap.storage.texts import as_line, is_line


class FolderFile(NamedTuple):
    name: str  # path within the folder, with slashes
    size: int  # bytes
    modified: int  # nanoseconds since 1970


def list_folder(folder: Path) -> tuple[list[FolderFile], list[Skipped]]:
    """List the images in a folder and below by path, and the other files with the reason for leaving each out.

    Links may not lead out of the folder.
    """
    found: list[FolderFile] = []
    left_out: list[Skipped] = []
    root = folder.resolve()
    for path in walk_images(folder, follow=False):
        if isinstance(path, Skipped):
            left_out.append(path._replace(name=os.path.relpath(path.name, folder)))
            continue
        name = path.relative_to(folder).as_posix()
        try:
            if not is_line(name):
                problem = "names that are no text in UTF-8, or have line breaks or tabs in them"
            elif not path.is_file():
                problem = "links to nothing" if path.is_symlink() else "no regular files"
            elif path.is_symlink() and not path.resolve().is_relative_to(root):
                problem = "links that lead out of the folder"
            else:
                status = path.stat()
                found.append(FolderFile(name, status.st_size, status.st_mtime_ns))
                continue
        except OSError as error:
            problem = f"files that cannot be read: {error.strerror}"
        left_out.append(Skipped(name, problem))
    if not found:
        told = "".join(f"\nleft out: {line}" for line in counted(left_out))
        raise DistapError(
            f"{folder}: no image in it, nor shards; expected {', '.join(readable_formats())} files{told}"
        )
    return sorted(found), sorted(Skipped(as_line(name), reason) for name, reason in left_out)


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
    cache: CacheSettings | None = None,
) -> ImageSet:
    """Open the images of shards (see `Reader`), or of a local folder without index and shards."""
    source = parse_source(source)
    if _is_plain(source):
        files, left_out = list_folder(Path(source.base))
        names, sizes, times = zip(*files, strict=True)
        # The times of change stand for digests of what the files hold, which only reading them would tell.
        index = index_of_files(source, names, names, [""] * len(names), sizes, [str(time) for time in times])
        index, source = replace(index, left_out=tuple(left_out)), replace(source, kind="imagefolder")
    else:
        index = load_index(source, remote)
    keys = index.names
    if len(np.unique(keys)) < len(keys):  # each shard of other makers may count from 0
        shards = index.shard_name[index.shard].tolist()
        keys = np.array([f"{shard}:{key}" for shard, key in zip(shards, index.key.tolist(), strict=True)])
    reader = Reader(source, index, max_pixels, remote, cache)
    return ImageSet(str(source), index.fingerprint, keys, index.class_name[index.label], reader, index.left_out)


def _is_plain(source: Source) -> bool:
    folder = Path(source.base)
    is_named = source.pattern is not None or source.kept_index is not None or source.kind != "shards"
    if source.scheme or is_named or not folder.is_dir():
        return False
    return not Path(source.index).exists() and next(folder.glob("*.tar"), None) is None
