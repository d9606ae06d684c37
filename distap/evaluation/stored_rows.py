"""Rows that a loss takes of each training image, such as a teacher's, from folders of `distap
extract`.

They are joined to the images by name, and taken by the images' numbers, so that neither the order
of the folder nor that of the batches matters.
"""

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distap.checkpoint.agreement import on_all
from distap.data.joined import MixedImages
from distap.data.loading.reader import ImageSet
from distap.data.loading.share import NO_SAMPLE, RowsOf
from distap.data.shards.parallel import untracked
from distap.errors import DistapError, logger
from distap.evaluation.row_folder import RowFolder, open_row_folder, refuse_repeated_images
from distap.retrieval.descriptor_files import (
    ABOUT_FILE,
    CLASSES_FILE,
    DESCRIPTORS_FILE,
    KEYS_FILE,
    NETWORKS_FILE,
    SHORT,
    read_descriptors,
)
from distap.retrieval.row_blocks import BLOCK_NUMBERS, DescriptorParts
from distap.storage.atomic import make_folder
from distap.storage.cache import CacheSettings
from distap.storage.files import Storage
from distap.storage.locations import Source, parse_source
from distap.telemetry.terminal import track
from distap.world import World

ROW_TYPES = ("float16", "float32")


class StoredRows:
    """Rows of each image of a training, by the names under which the loss takes them.

    Every rank makes one. One rank of each host reads all rows once.

    Args:
        folders: by name, the folder of each data set by its recipe key.
        cache: where a host keeps copies of folders in stores; None takes its temporary files.
    Raises:
        DistapError: on all ranks: a folder cannot be used, or hosts have other rows.
    """

    def __init__(
        self,
        folders: Mapping[str, Mapping[str, Source | str]],
        cache: CacheSettings | None,
        world: World,
    ) -> None:
        self._folders: dict[str, list[RowFolder]] = {}

        def open_all() -> None:
            for name, of_sets in folders.items():
                self._folders[name] = [_opened(key, where, cache) for key, where in of_sets.items()]

        def check() -> dict[str, str]:
            open_all()
            return {
                key: _fingerprint(folder, shows=world.rank == 0)
                for name, of_sets in folders.items()
                for key, folder in zip(of_sets, self._folders[name], strict=True)
            }

        world.note("reading data.rows")
        by_rank = on_all(world, check, takes_part=world.local_rank == 0)
        # SHA-256 of rows and names, by the recipe key of the folder.
        self.fingerprints: dict[str, str] = by_rank[0]
        for rank, of_rank in enumerate(by_rank):
            for key, fingerprint in (of_rank or {}).items():
                if fingerprint != self.fingerprints[key]:
                    raise DistapError(
                        "ranks.differ",
                        f"{key}: {world.called(rank)} has other rows than rank 0: give all hosts"
                        " the same folder",
                    )
        on_all(world, open_all, takes_part=not self._folders)
        for folder in (folder for of_sets in self._folders.values() for folder in of_sets):
            logger.info(
                "%s: %s rows of %s dimensions, of the images of %s by the network %s",
                folder.where,
                *(f"{length:,}" for length in folder.stored.descriptors.shape),
                folder.stored.data,
                folder.stored.described_by.network[:SHORT],
            )

    def joined(self, images: ImageSet | MixedImages) -> RowsOf:
        """Return a function that reads rows by the numbers of images.

        It returns (n, C) float32 of n numbers; or (n,), if rows have one dimension.

        Raises:
            DistapError: an image has no row, or has the name of another one; or data sets have rows
                of other dimensions.
        """
        sets = images.sets if isinstance(images, MixedImages) else (images,)
        for of_set in sets:
            refuse_repeated_images(of_set.keys, of_set.name)
        tables = dict[str, tuple[DescriptorParts, NDArray[np.int64]]]()
        for name, folders in self._folders.items():
            stored = [folder.stored.descriptors for folder in folders]
            if len({values.shape[1] for values in stored}) > 1:
                raise DistapError(
                    "data.unequal_dimensions",
                    "; ".join(
                        f"{folder.where}: {values.shape[1]} dimensions"
                        for folder, values in zip(folders, stored, strict=True)
                    )
                    + ": those of all sets have to come from one network",
                )
            first = np.cumsum([0, *map(len, stored[:-1])])
            rows = [
                begin + folder.require(of_set.keys, of_set.name)
                for begin, folder, of_set in zip(first, folders, sets, strict=True)
            ]
            parts = DescriptorParts(
                [(folder.where, folder.stored.descriptors) for folder in folders]
            )
            tables[name] = parts, np.concatenate(rows)

        def read(samples: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
            is_there = samples != NO_SAMPLE
            taken = dict[str, NDArray[np.float32]]()
            for name, (parts, row_of) in tables.items():
                values = np.zeros((len(samples), parts.shape[1]), np.float32)
                values[is_there] = parts[row_of[samples[is_there]]]
                taken[name] = values[:, 0] if values.shape[1] == 1 else values
            return taken

        return read


def _opened(key: str, where: Source | str, cache: CacheSettings | None) -> RowFolder:
    """Open a folder that a recipe's `key` names; copy it to this host's disk if it is in a store.

    Raises:
        DistapError: the folder is missing or damaged, or its rows are of another type.
    """
    source = parse_source(where)
    if source.kind != "shards" or source.pattern is not None or source.is_part:
        raise DistapError(
            "data.bad_source",
            f"{key}: {source}: expected a folder of `distap extract`, on disk or behind a URL",
        )
    path = _copied(key, source, cache) if source.scheme else Path(source.base)
    folder = open_row_folder(path, f"{key}: {source}")
    folder.stored.require_one_network(f"{key} takes rows of one network")
    dtype = folder.stored.descriptors.dtype
    if dtype.name not in ROW_TYPES:
        raise DistapError(
            "descriptors.wrong_shape",
            f"{folder.where}: rows of {dtype}; expected {' or '.join(ROW_TYPES)}, as `distap"
            " extract` writes them",
        )
    return folder


def _fingerprint(folder: RowFolder, shows: bool) -> str:
    """Read all rows once, and return the SHA-256 of rows and names.

    Args:
        shows: show a progress bar if there are many rows.
    Raises:
        DistapError: a row is not finite.
    """
    values = folder.stored.descriptors
    keys = np.ascontiguousarray(folder.stored.keys)
    digest = hashlib.sha256(f"{values.dtype.str} {values.shape} {keys.dtype.str} ".encode())
    digest.update(keys.view(np.uint8).data)
    height = max(BLOCK_NUMBERS // max(values.shape[1], 1), 1)
    starts = range(0, len(values), height)
    tracked = track if shows and len(starts) > 1 else untracked
    for start in tracked(starts, f"reading {folder.where}", len(starts)):
        block = np.ascontiguousarray(values[start : start + height])
        is_wrong = ~np.isfinite(block).all(axis=1)
        if is_wrong.any():
            raise DistapError(
                "descriptors.not_finite",
                f"{folder.where}: the row of {keys[start + is_wrong.argmax()]} is not finite:"
                " extract again",
            )
        digest.update(block.data)
    return digest.hexdigest()


def _copied(key: str, source: Source, cache: CacheSettings | None) -> Path:
    """Return the copy of a store's folder on this host's disk, which its ranks make once.

    Raises:
        DistapError: the store cannot be read, or the disk not be written.
    """
    storage = Storage(source.base)
    # The record has the SHA-256 of the names, and tells what described them.
    record = storage.read_whole(ABOUT_FILE)
    digest = hashlib.sha256(source.base.encode() + b"\n" + record).hexdigest()
    base = Path(tempfile.gettempdir(), f"distap-{os.getuid()}") if cache is None else cache.folder
    folder = base.expanduser() / f"rows-{digest[:16]}"
    names = [KEYS_FILE, CLASSES_FILE, DESCRIPTORS_FILE]
    if NETWORKS_FILE.encode() in record:
        names.append(NETWORKS_FILE)
    try:
        if cache is None:
            base.mkdir(mode=0o700, exist_ok=True)
            # Others may write to the folder of temporary files, and its name can be guessed.
            if base.lstat().st_uid != os.getuid():
                raise PermissionError(errno.EACCES, f"{base} belongs to another user")
        make_folder(folder)
        # The kernel frees the lock of a process that is killed. What it leaves is written anew.
        with (folder / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(DistapError):
                read_descriptors(folder)
                return folder
            (folder / ABOUT_FILE).unlink(missing_ok=True)
            for name in names:
                storage.download(name, folder / name)
            (folder / ABOUT_FILE).write_bytes(record)
    except OSError as error:
        raise DistapError(
            "storage.cannot_write",
            f"{key}: {folder}: {source} cannot be copied there: {error.strerror or error}: make"
            " room, or name another folder by data.cache.folder, or by TMPDIR",
        ) from error
    return folder
