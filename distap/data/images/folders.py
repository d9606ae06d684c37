"""A plain folder of images that belong to no class, read where they are."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError, EncodedImage, upright_size
from distap.data.shards.image_files import IMAGE_SUFFIXES
from distap.errors import DistapError

HEADER_BYTES = 1 << 16  # in which nearly every image has its size and orientation
UNKNOWN = (0, 0)


@dataclass(frozen=True)
class ImageFolder:
    """The images in a folder and its sub-folders, by name.

    Attributes:
        folder: that they are in.
        names: paths within it, with slashes, in order; sizes and times of change stand in the same order.
        left_out: what is named like an image but not read, and why.
        max_pixels: width times height of an image that is refused without decoding when exceeded.
    """

    folder: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    modified: tuple[int, ...]
    left_out: tuple[tuple[str, str], ...]
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        """Number of images."""
        return len(self.names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names, sizes and times of change: folders with the same one hold the same images."""
        digest = hashlib.sha256()
        for name, size, modified in zip(self.names, self.sizes, self.modified, strict=True):
            digest.update(f"{name}\0{size}\0{modified}\n".encode())
        return digest.hexdigest()

    def encoded(self, sample: int) -> EncodedImage:
        """The image before it is decoded.

        Raises:
            DamagedImageError: it cannot be read or is no image.
        """
        try:
            data = (self.folder / self.names[sample]).read_bytes()
        except OSError as error:
            raise DamagedImageError("decode_error", f"cannot be read: {error.strerror or error}") from error
        return EncodedImage(data, self.max_pixels, self.names[sample])

    def size(self, sample: int) -> tuple[int, int]:
        """Width and height as it will be decoded, from the file's header; UNKNOWN where that cannot be told."""
        try:
            with (self.folder / self.names[sample]).open("rb") as file:
                start = file.read(HEADER_BYTES)
                try:
                    return upright_size(start, self.max_pixels)
                except DamagedImageError:
                    return upright_size(start + file.read(), self.max_pixels)
        except (OSError, DamagedImageError):
            return UNKNOWN


def list_folder(folder: Path, max_pixels: int = MAX_PIXELS) -> ImageFolder:
    """The images of a folder, however deep, in the order of their paths; links are followed within the folder only.

    Raises:
        DistapError: it cannot be listed, or there is no image in it.
    """
    found: list[tuple[str, int, int]] = []
    left_out: list[tuple[str, str]] = []
    root = folder.resolve()
    try:
        for entry in _files(folder):
            name = os.path.relpath(entry.path, folder).replace(os.sep, "/")
            if problem := _problem(entry, name, root):
                left_out.append((name.encode(errors="backslashreplace").decode(), problem))
            else:
                status = entry.stat()
                found.append((name, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise DistapError(f"{error.filename or folder}: cannot be listed: {error.strerror or error}") from error
    if not found:
        raise DistapError(
            f"{folder}: no image in it, nor shards; expected files that end in {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    names, sizes, modified = zip(*sorted(found), strict=True)
    return ImageFolder(folder, names, sizes, modified, tuple(sorted(left_out)), max_pixels)


def _files(folder: Path) -> "Iterator[os.DirEntry[str]]":
    """What is named like an image, also below; hidden folders and files are no part of the data."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES:
                yield entry


def _problem(entry: "os.DirEntry[str]", name: str, root: Path) -> str:
    """Why a file is not to be read; nothing where it is."""
    if not _is_text(name):
        return "its name is no text in UTF-8, or has line breaks in it"
    if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
        return "a link that leads out of the folder"
    return "" if entry.is_file() else "no regular file"


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.isprintable()
