"""Read the index of any data set: shards, single files, or a data set in Python."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distap.data.labels import table_of_levels
from distap.data.map_style import rows_behind
from distap.data.shards.image_files import (
    ImageFile,
    levels_of_each_class,
    list_images,
    list_unlabelled,
    look_at_all,
    sort_classes,
)
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Index, index_place, parse_index
from distap.data.shards.parallel import untracked
from distap.errors import DistapError
from distap.storage.files import storage_of
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import MissingFileError, RemoteSettings
from distap.storage.texts import as_line, is_line

THREADS = 16  # remote shards whose sizes are asked for at once


def load_index(source: Source | Path | str, remote: RemoteSettings | None = None, compare: bool = True) -> Index:
    """Read and check a data set's index; with `compare`, also that its shards exist with the same sizes."""
    source = parse_source(source)
    if source.kind == "described":
        raise DistapError(f"{source}: these are descriptors, and no images; only training and evaluation take them")
    if (rows := rows_behind(source)) is not None:
        images = list(map(ImageFile, map(Path, rows.keys), rows.classes, rows.levels))
        index = index_of_files(source, range(len(rows.keys)), rows.keys, images, 0, rows.digests())
        return replace(index, left_out=rows.left_out)
    if source.kind == "imagefolder":
        return index_of_folder(source)
    storage, name = index_place(source, remote)
    try:
        index = parse_index(storage.mapped(name), source.index)
    except MissingFileError as error:
        if not source.scheme and not Path(source.base).is_dir():
            raise DistapError(f"{source}: no such data set: there is no folder {source.base}") from error
        if not source.scheme and source.pattern is None and not any(Path(source.base).glob("*.tar")):
            raise DistapError(
                f"{source}: no .tar file is in it; for a folder with a sub-folder a class write "
                f"imagefolder:{source}, or pack it by `distap data pack`"
            ) from error
        missing = f"{source.index}: no such file" if source.kept_index else f"{source}: no {name} in it"
        raise DistapError(f"{missing}; `distap data index {source}` makes one from its shards") from error
    if len(index) == 0:
        raise DistapError(f"{source}: the data set is empty")
    if compare:
        _require_shards(source, remote, index)
    return index


def index_of_folder(source: Source, labelled: bool = True) -> Index:
    """Make an index of images in any folder; or in a folder for each class, in those of coarser classes if any."""
    folder = Path(source.base)
    if not folder.is_dir():
        raise DistapError(f"{source}: no such folder")
    listing = list_images(folder, "levels") if labelled else list_unlabelled(folder)
    entries, broken = look_at_all(listing.images, "", untracked)
    of_name = {entry.image.path.relative_to(folder).as_posix(): entry for entry in entries}
    names, unfit = ([name for name in of_name if is_line(name) is fits] for fits in (True, False))
    images, sizes = [of_name[name].image for name in names], [of_name[name].size for name in names]
    # The times of change stand for digests of what the files hold, which only reading them would tell.
    times = "" if labelled else [str(of_name[name].modified) for name in names]
    index = index_of_files(source, names, names, images, sizes, times)
    told = [(os.path.relpath(name, folder), reason) for name, reason in (*listing.left_out, *broken)]
    told += [(name, "names that are no line of text in UTF-8") for name in unfit]
    return replace(index, left_out=tuple(Skipped(as_line(name), reason) for name, reason in told))


def index_of_files(
    source: Source, names: Sequence[Any], keys: Sequence[str], images: Sequence[ImageFile], sizes: Any, digests: Any
) -> Index:
    """Make an index that treats each image file as a shard; unknown sizes are 0 and unknown digests "".

    Either all images have a class or none.
    """
    for key in keys:
        if not is_line(key):
            raise DistapError(f"{source}: {key!r}: rename it without tabs, line breaks and bytes that are no UTF-8")
    levels = levels_of_each_class(images) if any(image.class_name for image in images) else {"": ()}
    classes = sort_classes(levels)
    numbers = {name: number for number, name in enumerate(classes)}
    count, zeros = len(names), np.zeros(len(names), dtype=np.int32)
    size = np.broadcast_to(np.asarray(sizes, dtype=np.int64), count).copy()
    return Index(
        shard=np.arange(count, dtype=np.int32),
        offset=np.zeros(count, dtype=np.int64),
        size=size,
        crc32=np.zeros(count, dtype=np.uint32),
        label=np.array([numbers[image.class_name] for image in images], dtype=np.int64),
        width=zeros,
        height=zeros,
        key=np.array(keys),
        path=np.array(keys),
        shard_name=np.array(names, dtype=np.str_),
        shard_size=size,
        shard_sha256=np.broadcast_to(np.asarray(digests), count).copy(),
        class_name=np.array(classes),
        class_levels=table_of_levels([levels[name] for name in classes]),
    )


def _require_shards(source: Source, remote: RemoteSettings | None, index: Index) -> None:
    storage, names = storage_of(source.base, remote), index.shard_name.tolist()
    first = storage.about(names[0])  # alone, so that a wrong setting is tried once
    with ThreadPoolExecutor(THREADS) as pool:
        found = [first, *(pool.map if source.scheme else map)(storage.about, names[1:])]
    for name, size, shard in zip(names, index.shard_size.tolist(), found, strict=True):
        if shard.size != size:
            raise DistapError(
                f"{storage.where(name)}: {shard.size} bytes, but {size} when it was indexed; fetch or pack it again, "
                "or, if it was replaced on purpose, index the data set again with `distap data index`"
            )
