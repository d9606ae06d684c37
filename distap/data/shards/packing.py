"""Pack images into WebDataset tar shards in parallel.

Shards are written into a hidden folder next to the output; one rename then makes the complete
output appear. The number of processes changes no byte.
"""

import io
import re
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from distap.data.images.boxes import Box
from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage, image_file, image_size, seems_cut
from distap.data.images.formats import IMAGE_SUFFIXES, format_of
from distap.data.shards.image_files import (
    ImageFile,
    Listing,
    levels_of_each_class,
    look_at_all,
    sort_classes,
)
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Index
from distap.data.shards.indexing import NAMES_FILE, Scan, merge_scans, scan_shard
from distap.data.shards.parallel import Track, map_in_processes, untracked
from distap.data.shards.tar import LABEL_FIELD
from distap.errors import DistapError
from distap.randomness import permutation
from distap.storage.atomic import new_folder, write_whole
from distap.storage.files import Storage
from distap.storage.locations import parse_source


def pack_parts(
    parts: Mapping[str, Listing],
    output: Path,
    images_per_shard: int = 1000,
    track: Track = untracked,
    *,
    shuffle: int | None = None,
    workers: int = 1,
    files: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[Index, list[Skipped]]]:
    """Pack each part into shards in the folder of its name; return its index and the files left
    out.

    Args:
        parts: the images by name of part; "" fills the output folder itself. output: folder of the
            shards; it must not exist, or be empty, and appears when everything is in it.
            images_per_shard: the most images in a shard; the last shard, and those with damaged
            images, have fewer. shuffle: seed of a random order, which streamed reading needs. The
            given order is faster to read by an index. files: texts to write into the output folder,
            by name.
    Raises:
        DistapError: no image is usable, levels of classes cross, the output holds something
            already, an image cannot be read, or the output cannot be written.
    """
    for part in parts.values():
        levels_of_each_class(part.images)  # raises where classes cross, before hours of packing
    with new_folder(output) as whole:
        packed = [
            _pack(whole / name, part, images_per_shard, shuffle, workers, track)
            for name, part in parts.items()
        ]
        for name, text in files.items():
            write_whole(whole / name, text)
    return packed


def _pack(
    folder: Path, listing: Listing, count: int, shuffle: int | None, workers: int, track: Track
) -> tuple[Index, list[Skipped]]:
    """Write shards of `count` images and their index into a folder; return the index and the images
    left out.
    """
    sound, gone = look_at_all(listing.images)  # what is not there takes no place in a shard
    images = [image for image, _ in sound]
    levels = levels_of_each_class(listing.images)
    if shuffle is not None:
        images = [images[place] for place in permutation(len(images), shuffle)]
    # The labels of a CSV are numbers already; other classes are numbered in the order of their
    # names. Those without a sound image keep their number in the shards, and the index leaves it
    # out.
    names = sort_classes(image.class_name for image in images)
    write_whole(
        folder / NAMES_FILE,
        "".join("\t".join((name, *levels[name])).rstrip("\t") + "\n" for name in names),
    )
    labels = {name: str(number).encode() for number, name in enumerate(names)}
    write = partial(_write_shard, folder, images, labels, count)
    scans = map_in_processes(
        write, range(-(-len(images) // count)), workers, "packing shards", track
    )
    left_out = list(chain.from_iterable(scan.left_out for scan in scans))
    keys = list(chain.from_iterable(scan.columns["key"].tolist() for scan in scans))
    if not keys:
        told = f"first: {': '.join([*gone, *left_out][0])}; paths are relative to this folder"
        raise DistapError(
            f"{listing.root}: none of the {len(listing.images)} images can be read; {told}"
        )
    source = parse_source(folder)
    paths = {key: listing.name_of(images[int(key.partition("-")[0])]) for key in keys}
    index = merge_scans(source, Storage(source.base), scans, paths)
    index.save(source)
    return index, [*listing.left_out, *gone, *left_out]


def _write_shard(
    folder: Path, images: Sequence[ImageFile], labels: Mapping[str, bytes], count: int, number: int
) -> Scan:
    """Write a shard of `count` images; return what is in it, and the images left out."""
    skipped = list[Skipped]()
    place = folder / f"{number:06d}.tar"
    first = number * count
    with tarfile.open(place, "w", format=tarfile.USTAR_FORMAT) as shard:
        for position, image in enumerate(images[first : first + count], first):
            path = image.path
            data = image_file(path)
            if not data:
                skipped.append(Skipped(str(path), "empty files"))
                continue
            try:
                if image.box is not None:
                    data, path = _cut_out(data, image.box), path.with_suffix(".jpg")
                # Decoding every image would take long, so only one without its end marker is, which
                # may be cut. `distap data check` finds damage elsewhere in a file.
                EncodedImage(data, name=str(path)).whole() if seems_cut(data) else image_size(data)
            except DamagedImageError as error:
                skipped.append(Skipped(str(path), str(error)))
                continue
            # For WebDataset a key ends at the first dot of a name, so the stem must not have any.
            stem = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem)[:60]
            suffix = path.suffix.lower()
            known = format_of(data)
            if suffix not in IMAGE_SUFFIXES and known is not None:
                suffix = known.suffixes[0]
            fields = {suffix.removeprefix("."): data, LABEL_FIELD: labels[image.class_name]}
            for field, content in sorted(fields.items()):
                # Its times and owners stay 0, so that the same images give the same bytes on any
                # day and host.
                member = tarfile.TarInfo(f"{position:08d}-{stem}.{field}")
                member.size = len(content)
                member.mode = 0o444
                # as webdataset writes it, which would wait for torch
                member.uname = member.gname = "bigdata"
                shard.addfile(member, io.BytesIO(content))
    return scan_shard(Storage(str(folder)), place.name)._replace(left_out=skipped)


def _cut_out(data: bytes, box: Box) -> bytes:
    """Return a part of an image as JPEG, of quality 95 and with all of its colour."""
    image = EncodedImage(data).whole()
    buffer = io.BytesIO()
    left, top, right, bottom = box
    inside = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise DamagedImageError(
            "decode_error", f"box {box} lies outside of {image.width} x {image.height} pixels"
        )
    image.crop(inside).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()
