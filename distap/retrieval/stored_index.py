"""Write an index into a folder of generations, and read it back without copying descriptors.

Faiss trusts its files, and a damaged one can crash the process. So size and SHA-256 are compared
before Faiss reads a byte.
"""

from __future__ import annotations  # `help` shows the types as they are written here

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distap.errors import DistapError
from distap.retrieval import descriptor_files as files
from distap.retrieval.descriptor_files import reading
from distap.retrieval.generations import (
    GENERATIONS_FOLDER,
    LOCK_FILE,
    current_generation,
    updating,
    write_generation,
)
from distap.retrieval.row_blocks import installed_faiss, row_blocks
from distap.retrieval.searching import FlatRows, SearchIndex

INDEX_FILE = "index.faiss"  # of any kind but the flat one, which searches the descriptors
IDS_FILE = "ids.npy"  # numbers of rows in an index from which rows were removed
ABOUT_INDEX = ("index", "build_seconds", "measured")  # entries of about.json


def write_index(folder: Path, index: SearchIndex) -> SearchIndex:
    """Write a new generation of an index, switch to it, and return it as it was read back."""
    require_free_for_index(folder)
    with updating(folder):
        return write_next(folder, index)


def write_next(folder: Path, index: SearchIndex) -> SearchIndex:
    """Write the next generation within `updating`."""
    images = index.images

    def write_rows(file: BinaryIO) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": images.descriptors.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for _, block in row_blocks(images.descriptors):
            file.write(block.tobytes())

    # The flat index is its descriptors, which others store next to their codes: for exact search
    # after a filter, searches by key, and to build a graph anew.
    write: dict[str, Callable[[BinaryIO], Any]] = {files.DESCRIPTORS_FILE: write_rows}
    if not isinstance(index.index, FlatRows):
        write[INDEX_FILE] = lambda file: installed_faiss().write_index(index.index, file.name)
    if index.ids is not None:
        write[IDS_FILE] = partial(np.save, arr=index.ids)
    entries = {name: index.about[name] for name in ABOUT_INDEX if name in index.about}
    # The record takes shape and type alone from an array, and `write_rows` is what reads rows, a
    # block at a time: one number, seen as N x C of them, stands in for rows that may not fit.
    shape = np.broadcast_to(np.zeros(1, np.float32), images.descriptors.shape)
    stored = replace(images, descriptors=shape)
    return write_generation(
        folder,
        lambda generation: files.write_described(generation, stored, write, hashed=True, **entries),
        partial(_read_generation, hashed=True),
    )


def require_free_for_index(folder: Path) -> None:
    """Raise a DistapError if a folder holds anything but an index whose writing was interrupted."""
    paths = folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else []
    names = {path.name for path in paths}
    if names - {GENERATIONS_FOLDER, LOCK_FILE}:
        raise DistapError(
            "index.folder_in_use",
            f"{folder}: {', '.join(sorted(names)[:3])} would be lost; move it, or name a new"
            " folder",
        )


def read_index(folder: Path, changeable: bool = False) -> SearchIndex:
    """Read the current generation; raise a DistapError that names a damaged file.

    Args:
        changeable: read the index of Faiss into memory, so that rows can be added and removed.
    """
    return _read_generation(current_generation(folder), changeable=changeable)


def stored_bytes(index: SearchIndex) -> int:
    """Return the bytes of what a search reads: the index of Faiss, or the descriptors."""
    stored = index.about["files"]
    return int(stored.get(INDEX_FILE, stored[files.DESCRIPTORS_FILE])["bytes"])


def _read_generation(
    generation: Path, hashed: bool = False, changeable: bool = False
) -> SearchIndex:
    images, about = files.read_described(
        generation, "distap index", "index it again", (INDEX_FILE, IDS_FILE), hashed
    )
    ids = None
    with reading(generation, "distap index"):
        # A ValueError for half of a surrogate pair, which no terminal or page can show.
        "".join((*images.keys.tolist(), *images.classes.tolist())).encode()
        if INDEX_FILE not in about["files"]:
            return SearchIndex(FlatRows(images.descriptors), images, about, None, generation.name)
        # Faiss copies an index that it reads, once for each process. What it can map are pages of
        # the file, which all processes share and which come when a search needs them.
        faiss = installed_faiss()
        mapped = getattr(faiss, "IO_FLAG_MMAP_IFC", 0)  # since Faiss 1.11
        index = faiss.read_index(str(generation / INDEX_FILE), 0 if changeable else mapped)
        if (index.ntotal, index.d) != images.descriptors.shape:
            raise ValueError(
                f"{index.ntotal} rows of {index.d} dimensions, but {files.ABOUT_FILE} says"
                f" {images.descriptors.shape}"
            )
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError("it ranks by distances, not by similarities")
        if IDS_FILE in about["files"]:
            ids = np.load(generation / IDS_FILE, allow_pickle=False)
            # Ascending, since `searchsorted` finds the row of a number by it.
            if ids.shape != (len(images),) or (np.diff(ids) <= 0).any():
                raise ValueError(f"{IDS_FILE} does not number {len(images)} rows")
    return SearchIndex(index, images, about, ids, generation.name)
