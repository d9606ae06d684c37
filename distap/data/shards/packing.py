"""Pack images into WebDataset tar shards in parallel.

Shards are written into a hidden folder next to the output; one rename then makes the complete
output appear. The number of processes changes no byte.
"""

import io
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from distap.data.images.boxes import Box, clipped
from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage, image_file, image_size, seems_cut
from distap.data.images.formats import FORMAT_BY_SUFFIX, format_of
from distap.data.shards.image_files import (
    ImageFile,
    Listing,
    levels_of_each_class,
    look_at_all,
    sort_classes,
)
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Scaling
from distap.data.shards.indexing import NAMES_FILE, Packed, Scan, merge_scans, scan_shard
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.data.shards.tar import FACTS_FIELD, LABEL_FIELD, columns_member
from distap.errors import DistapError
from distap.randomness import permutation
from distap.storage.atomic import new_folder, write_whole
from distap.storage.files import Storage
from distap.storage.locations import parse_source

Order = Literal["classes", "listed", "random"]


def pack_parts(
    parts: Mapping[str, Listing],
    output: Path,
    images_per_shard: int = 1000,
    track: Track = untracked,
    *,
    order: Order = "classes",
    scaling: Scaling | None = None,
    workers: int = 1,
    files: Mapping[str, str] = MappingProxyType({}),
) -> list[Packed]:
    """Pack each part into shards in the folder of its name.

    Args:
        parts: the images by name of part; "" fills the output folder itself.
        output: folder of the shards; it must not exist, or be empty, and appears when everything is
            in it.
        images_per_shard: the most images in a shard.
        order: `classes` keeps the images of a class together, the classes in a random order, and
            ends a shard where the next class does not fit any more; a class of more than
            `images_per_shard` images fills shards of its own. So a loader reads the images of a
            class, and classes of one shard, in one request. `listed` is the order of the listing,
            and `random`, of single images, is what streamed reading needs; both fill every shard
            but the last.
        scaling: None packs images byte for byte. Otherwise those with a longer shorter side are
            scaled down to it and become JPEG: upright, with the colours and the transparency of
            `EncodedImage`, and the colour profile if it is one for RGB. Other EXIF data is lost.
        files: texts to write into the output folder, by name.
    Raises:
        DistapError: no image is usable, levels of classes cross, the output holds something
            already, an image cannot be read, or the output cannot be written.
    """
    for listing in parts.values():
        levels_of_each_class(listing.images)  # raises before hours of packing if classes cross
    with new_folder(output) as folder:
        packed = [
            _pack(folder / name, listing, images_per_shard, order, scaling, workers, track)
            for name, listing in parts.items()
        ]
        for name, text in files.items():
            write_whole(folder / name, text)
    return packed


def _pack(
    folder: Path,
    listing: Listing,
    count: int,
    order: Order,
    scaling: Scaling | None,
    workers: int,
    track: Track,
) -> Packed:
    """Write shards of at most `count` images and their index into a folder."""
    sound, gone = look_at_all(listing.images)  # a missing file takes no place in a shard
    images, sizes = _ordered([image for image, _ in sound], order)
    # The labels of a CSV are numbers already; other classes are numbered in the order of their
    # names. Those without a sound image keep their number in the shards, and the index leaves it
    # out.
    names = sort_classes(image.class_name for image in images)
    levels = levels_of_each_class(listing.images)
    lines = ("\t".join((name, *levels[name])).rstrip("\t") + "\n" for name in names)
    write_whole(folder / NAMES_FILE, "".join(lines))

    labels = {name: str(number).encode() for number, name in enumerate(names)}
    write = partial(_write_shard, folder, images, labels, scaling)
    jobs = list(enumerate(_spans(sizes, count)))
    scans = map_in_processes(write, jobs, workers, "packing shards", track)
    left_out = [*gone, *chain.from_iterable(scan.left_out for scan in scans)]
    # A key begins with the image's number.
    paths = {
        key: listing.name_of(images[int(key.partition("-")[0])])
        for scan in scans
        for key in scan.columns["key"].tolist()
    }
    if not paths:
        raise DistapError(
            "data.unreadable",
            f"{listing.root}: none of the {len(listing.images)} images can be read; first:"
            f" {': '.join(left_out[0])}; paths are relative to this folder",
        )
    source = parse_source(folder)
    index = replace(merge_scans(source, Storage(source.base), scans, paths), scaling=scaling)
    index.save(source)
    return index, [*listing.left_out, *left_out]


def _ordered(images: list[ImageFile], order: Order) -> tuple[list[ImageFile], Iterable[int]]:
    """Return the images in the order to pack them, and the sizes of the runs to keep together."""
    if order == "classes":
        names = sort_classes(image.class_name for image in images)
        places = dict(zip(names, permutation(len(names), 0).tolist(), strict=True))
        images = sorted(images, key=lambda image: places[image.class_name])
        return images, Counter(image.class_name for image in images).values()
    if order == "random":
        images = [images[place] for place in permutation(len(images), 0)]
    return images, [len(images)]


def _spans(sizes: Iterable[int], count: int) -> list[range]:
    """Return the positions of each shard's images, at most `count`, from the sizes of runs.

    A shard holds as many whole runs as fit; a longer run is cut, in shards of its own.
    """
    edges = [0]
    stop = 0
    for size in sizes:
        if stop + size - edges[-1] > count:
            edges.append(stop)
        stop += size
    edges.append(stop)
    return [
        range(first, min(first + count, end))
        for start, end in pairwise(edges)
        for first in range(start, end, count)
    ]


def _write_shard(
    folder: Path,
    images: Sequence[ImageFile],
    labels: Mapping[str, bytes],
    scaling: Scaling | None,
    job: tuple[int, range],
) -> Scan:
    """Write a shard; `job` is its number, and the positions of its images."""
    left_out = list[Skipped]()
    number, positions = job
    place = folder / f"{number:06d}.tar"
    with tarfile.open(place, "w", format=tarfile.USTAR_FORMAT) as shard:
        for position in positions:
            image = images[position]
            data = image_file(image.path)
            suffix = image.path.suffix.lower()
            try:
                changed = _cut_and_scaled(data, image.box, scaling)
                if changed is not None:
                    data = changed
                    suffix = ".jpg"
                _require_sound(data, str(image.path))
            except DamagedImageError as error:
                left_out.append(Skipped(str(image.path), str(error) if data else "empty files"))
                continue
            # For WebDataset a key ends at the first dot of a name, so the stem must not have any.
            stem = re.sub(r"[^A-Za-z0-9_-]+", "_", image.path.stem)[:60]
            form = format_of(data)
            if suffix not in FORMAT_BY_SUFFIX and form is not None:
                suffix = form.suffixes[0]
            fields = {suffix.removeprefix("."): data, LABEL_FIELD: labels[image.class_name]}
            if image.columns:
                fields[FACTS_FIELD] = columns_member(image.columns)
            for field, content in sorted(fields.items()):
                # Its times and owners stay 0, so that the same images give the same bytes on any
                # day and host.
                member = tarfile.TarInfo(f"{position:08d}-{stem}.{field}")
                member.size = len(content)
                member.mode = 0o444
                # as webdataset writes it, which would wait for torch
                member.uname = member.gname = "bigdata"
                shard.addfile(member, io.BytesIO(content))
    return scan_shard(Storage(str(folder)), place.name)._replace(left_out=left_out)


def _require_sound(data: bytes, name: str) -> None:
    """Raise a DamagedImageError for a file that is no image, or cut.

    Decoding every image would take long, so only one without its end marker is decoded, which may
    be cut. `distap data check` finds damage elsewhere in a file.
    """
    if seems_cut(data):
        EncodedImage(data, name=name).whole()
    else:
        image_size(data)


def _cut_and_scaled(data: bytes, box: Box | None, scaling: Scaling | None) -> bytes | None:
    """Return the JPEG of an image that is cut to a box or scaled; None if it stays as it is."""
    if box is None and (scaling is None or min(image_size(data)) <= scaling.shorter_side):
        return None
    image = EncodedImage(data)
    inside = clipped(box or (0, 0, *image.size), *image.size)
    if inside is None:
        width, height = image.size
        raise DamagedImageError(
            "decode_error", f"box {box} lies outside of {width} x {height} pixels"
        )
    left, top, right, bottom = inside
    shape = bottom - top, right - left
    coding: dict[str, Any] = {"quality": 95, "subsampling": "4:4:4"}  # all of what was cut out
    if scaling is not None and min(shape) > scaling.shorter_side:
        scale = scaling.shorter_side / min(shape)
        shape = round(shape[0] * scale), round(shape[1] * scale)
        coding = {"quality": scaling.jpeg_quality, "subsampling": "4:2:0"}
    buffer = io.BytesIO()
    image.scaled(shape, inside).save(buffer, "JPEG", icc_profile=image.profile, **coding)
    return buffer.getvalue()
