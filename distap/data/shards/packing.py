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
from distap.data.shards.indexing import NAMES_FILE, Packed, Scan, merge_scans, scan_shard
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
) -> list[Packed]:
    """Pack each part into shards in the folder of its name.

    Args:
        parts: the images by name of part; "" fills the output folder itself.
        output: folder of the shards; it must not exist, or be empty, and appears when everything is
            in it.
        images_per_shard: the most images in a shard; the last shard, and those with damaged images,
            have fewer.
        shuffle: seed of a random order, which streamed reading needs. The given order is faster to
            read by an index.
        files: texts to write into the output folder, by name.
    Raises:
        DistapError: no image is usable, levels of classes cross, the output holds something
            already, an image cannot be read, or the output cannot be written.
    """
    for listing in parts.values():
        levels_of_each_class(listing.images)  # raises before hours of packing if classes cross
    with new_folder(output) as folder:
        packed = [
            _pack(folder / name, listing, images_per_shard, shuffle, workers, track)
            for name, listing in parts.items()
        ]
        for name, text in files.items():
            write_whole(folder / name, text)
    return packed


def _pack(
    folder: Path, listing: Listing, count: int, shuffle: int | None, workers: int, track: Track
) -> Packed:
    """Write shards of `count` images and their index into a folder."""
    sound, gone = look_at_all(listing.images)  # a missing file takes no place in a shard
    images = [image for image, _ in sound]
    if shuffle is not None:
        images = [images[place] for place in permutation(len(images), shuffle)]
    # The labels of a CSV are numbers already; other classes are numbered in the order of their
    # names. Those without a sound image keep their number in the shards, and the index leaves it
    # out.
    names = sort_classes(image.class_name for image in images)
    levels = levels_of_each_class(listing.images)
    lines = ("\t".join((name, *levels[name])).rstrip("\t") + "\n" for name in names)
    write_whole(folder / NAMES_FILE, "".join(lines))

    labels = {name: str(number).encode() for number, name in enumerate(names)}
    write = partial(_write_shard, folder, images, labels, count)
    numbers = range(-(-len(images) // count))
    scans = map_in_processes(write, numbers, workers, "packing shards", track)
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
    index = merge_scans(source, Storage(source.base), scans, paths)
    index.save(source)
    return index, [*listing.left_out, *left_out]


def _write_shard(
    folder: Path, images: Sequence[ImageFile], labels: Mapping[str, bytes], count: int, number: int
) -> Scan:
    """Write shard `number`, of `count` images."""
    left_out = list[Skipped]()
    place = folder / f"{number:06d}.tar"
    first = number * count
    with tarfile.open(place, "w", format=tarfile.USTAR_FORMAT) as shard:
        for position, image in enumerate(images[first : first + count], first):
            data = image_file(image.path)
            suffix = image.path.suffix.lower()
            try:
                if image.box is not None:
                    data = _cut_out(data, image.box)
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


def _cut_out(data: bytes, box: Box) -> bytes:
    """Return a part of an image as JPEG, of quality 95 and with all of its colour."""
    image = EncodedImage(data).whole()
    inside = clipped(box, *image.size)
    if inside is None:
        raise DamagedImageError(
            "decode_error", f"box {box} lies outside of {image.width} x {image.height} pixels"
        )
    buffer = io.BytesIO()
    image.crop(inside).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()
