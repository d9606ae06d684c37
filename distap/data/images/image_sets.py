"""Images to describe or search, in order: those of shards with an index, or of a plain folder."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, EncodedImage, image_size
from distap.data.images.formats import readable_formats
from distap.data.loading.indexed import Reader
from distap.data.pixel_and_cache_settings import CacheSettings
from distap.data.shards.image_folders import Skipped, as_line, counted, is_line, walk_images
from distap.data.shards.load_index import load_index
from distap.errors import DistapError
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings

HEADER_BYTES = 1 << 16  # the header of nearly every image fits in them
UNKNOWN = (0, 0)


@dataclass(frozen=True)
class ImageFolder:
    """The images in a folder and its sub-folders, which belong to no class."""

    folder: Path
    names: tuple[str, ...]  # paths within it, with slashes, in order
    fingerprint: str  # a hash of names, sizes and times of change
    left_out: tuple[Skipped, ...]  # files that are not read, and why
    max_pixels: int = MAX_PIXELS  # images with more (width times height) are refused without decoding

    def __len__(self) -> int:
        return len(self.names)

    def encoded(self, sample: int) -> EncodedImage:
        """The image before it is decoded; raises DamagedImageError if it cannot be read."""
        try:
            data = (self.folder / self.names[sample]).read_bytes()
        except OSError as error:
            raise DamagedImageError("decode_error", f"cannot be read: {error.strerror or error}") from error
        return EncodedImage(data, self.max_pixels, self.names[sample])

    def size(self, sample: int) -> tuple[int, int]:
        """Width and height as it will be decoded, from the file's header; UNKNOWN if it does not tell."""
        try:
            with (self.folder / self.names[sample]).open("rb") as file:
                start = file.read(HEADER_BYTES)
                try:
                    return image_size(start, self.max_pixels, upright=True)
                except DamagedImageError:
                    return image_size(start + file.read(), self.max_pixels, upright=True)
        except (OSError, DamagedImageError):
            return UNKNOWN


def list_folder(folder: Path, max_pixels: int = MAX_PIXELS) -> ImageFolder:
    """The images of a folder, however deep, in the order of their paths; links may not lead out of the folder."""
    found: list[tuple[str, int, int]] = []
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
                found.append((name, status.st_size, status.st_mtime_ns))
                continue
        except OSError as error:
            problem = f"files that cannot be read: {error.strerror}"
        left_out.append(Skipped(name, problem))
    if not found:
        told = "".join(f"\nleft out: {line}" for line in counted(left_out))
        raise DistapError(
            f"{folder}: no image in it, nor shards; expected {', '.join(readable_formats())} files{told}"
        )
    found.sort()
    described = "".join(f"{name}\0{size}\0{modified}\n" for name, size, modified in found)
    left_out = [Skipped(as_line(name), reason) for name, reason in left_out]
    fingerprint, names = hashlib.sha256(described.encode()).hexdigest(), tuple(name for name, *_ in found)
    return ImageFolder(folder, names, fingerprint, tuple(sorted(left_out)), max_pixels)


@dataclass(frozen=True)
class ImageSet:
    """N images in order, with their names and what reads them."""

    name: str  # as it was given
    fingerprint: str  # identifies the images
    keys: NDArray[np.str_]  # (N,) name of each, unlike all others
    classes: NDArray[np.str_]  # (N,) name of its class, "" for none
    reader: Reader | ImageFolder
    left_out: tuple[Skipped, ...] = ()  # files that are not read, and why

    def __len__(self) -> int:
        return len(self.keys)

    def sizes(self, samples: Sequence[int]) -> NDArray[np.int64]:
        """(n, 2) width and height in pixels as headers tell them: to plan with, not to rely on.

        Those of shards are as stored, before EXIF's orientation; (0, 0) is unknown.
        """
        files = self.reader
        if isinstance(files, Reader):
            index, rows = files.index, np.asarray(samples, dtype=np.int64)
            if files.source.kind == "shards":
                return np.stack([index.width[rows], index.height[rows]], axis=1).astype(np.int64)
            if files.source.kind == "imagefolder":
                files = ImageFolder(Path(files.source.base), tuple(index.key.tolist()), "", (), files.max_pixels)
        return np.array([files.size(sample) for sample in samples], dtype=np.int64).reshape(-1, 2)


def open_images(
    source: Source | Path | str,
    max_pixels: int = MAX_PIXELS,
    remote: RemoteSettings | None = None,
    cache: CacheSettings | None = None,
) -> ImageSet:
    """The images of shards (see `Reader`), or of a local folder that has neither an index nor shards in it."""
    source = parse_source(source)
    if _is_plain(source):
        images = list_folder(Path(source.base), max_pixels)
        keys, none = np.array(images.names, dtype=np.str_), np.zeros(len(images), dtype="<U1")
        return ImageSet(str(source), images.fingerprint, keys, none, images, images.left_out)
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
