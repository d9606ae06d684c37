"""List images to pack into shards: a folder with a sub-folder per class, or a CSV file.

Every file that is found is either listed as an image or reported as left out, with the reason.
"""

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from distap.data.images.boxes import Box
from distap.data.images.formats import readable_formats
from distap.data.labels import Levels, class_name_at, nesting
from distap.data.shards.image_folders import Skipped, counted, walk_images
from distap.data.shards.tables import LEVELS, ListLine, read_list
from distap.errors import DistapError, logger
from distap.randomness import permutation
from distap.storage.names import as_on_disk, composed
from distap.storage.texts import as_line, is_line

Nested = Literal["top", "leaf", "merge", "path", "levels"]
# Threads that look at files, and how many files each takes at once.
STAT_THREADS = 32
STAT_CHUNK = 256
LONGEST_CELL = 256  # letters of a cell that is kept with its image


class ImageFile(NamedTuple):
    path: Path
    class_name: str
    levels: Levels = ()
    # part to pack, upright, in pixels; what lies outside the image is cut off
    box: Box | None = None
    split: str = ""  # folder of shards to pack it into, if its list says so
    key: str = ""  # its name, if its list gives one
    columns: tuple[tuple[str, str], ...] = ()  # further columns of its list, and their cells


def look_at(path: Path) -> os.stat_result | Skipped:
    """Return the status of a file, or a `Skipped` if it is a broken link or no regular file."""
    try:
        status = path.stat()
    except OSError as error:
        reason = f"files that cannot be read: {error.strerror}"
        if os.path.islink(path):  # noqa: PTH114 - Path.is_symlink may raise
            reason = "links to nothing"
        elif isinstance(error, FileNotFoundError):
            reason = "listed images that are not there"
        return Skipped(str(path), reason)
    return status if stat.S_ISREG(status.st_mode) else Skipped(str(path), "no regular files")


def look_at_all(
    images: Sequence[ImageFile],
) -> tuple[list[tuple[ImageFile, os.stat_result]], list[Skipped]]:
    """Return the images that are files, with their status, and apart from them the others."""
    # A network file system answers slowly, but many questions at once.
    with ThreadPool(STAT_THREADS) as pool:
        looks = pool.map(look_at, [image.path for image in images], STAT_CHUNK)
        pool.close()
        pool.join()  # so that no thread is left when processes are forked
    sound = [
        (image, look)
        for image, look in zip(images, looks, strict=True)
        if not isinstance(look, Skipped)
    ]
    return sound, [look for look in looks if isinstance(look, Skipped)]


class Listing(NamedTuple):
    """The images of a source in order, and its other files."""

    images: Sequence[ImageFile]
    left_out: Sequence[Skipped]
    root: Path  # that the names of images are relative to

    def name_of(self, image: ImageFile) -> str:
        """Return the image's key, or its path within the source, as one line of text.

        Of a path that leads out of the source, what comes after `../` or `/`: the same wherever a
        list lies, as long as it names the image in the same way.
        """
        if image.key:
            return image.key
        path = os.path.relpath(image.path.absolute(), self.root.absolute())
        return as_line(re.sub(r"^(\.\./)+", "", path))

    def by_part(self) -> dict[str, "Listing"]:
        """Return the parts of the listing, such as train, by name.

        The files left out stay with the first part.
        """
        by_name = defaultdict[str, list[ImageFile]](list)
        for image in self.images:
            by_name[image.split].append(image)
        first = min(by_name, default="")
        return {
            name: Listing(by_name[name], self.left_out if name == first else (), self.root)
            for name in sorted(by_name)
        }

    def halves(self, share: float) -> "Listing":
        """Return the listing as two splits.

        `validation` has a share of the classes, drawn at random, and `train` the others.
        """
        names = sort_classes(image.class_name for image in self.images)
        count = round(share * len(names))
        if not 0 < count < len(names):
            raise DistapError(
                "data.too_few_classes",
                f"--split {share:g} of {len(names)} classes leaves one side without any",
            )
        drawn = {names[place] for place in permutation(len(names), 0)[:count]}
        split_of = {name: "validation" if name in drawn else "train" for name in names}
        return self._replace(
            images=[image._replace(split=split_of[image.class_name]) for image in self.images]
        )


def list_images(
    source: Path,
    nested: Nested | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    labelled: bool = True,
) -> Listing:
    """List the images of a folder with a sub-folder per class, or of a CSV file.

    The columns are found by their names: path or filename, label or class, and optionally level1
    (or group), level2 and so on (coarser classes that hold the class), split, which cuts the
    images into parts, and key, the name of an image; others are kept as further columns. A CSV has
    commas, semicolons or tabs between them. Paths are relative to the file. Files without a class
    (see `class_name`) are left out; whether a listed file is there is seen when it is packed.

    Args:
        nested: what names the class of an image deeper in a folder: `top`, its folder in `source`;
            `leaf`, the innermost folder, no two of which may have one name; `merge`, the same, but
            folders of one name are one class; `path`, all folders; `levels`, as `leaf`, in coarser
            classes that those above name. None refuses.
        renamed: the list's own names of columns, such as {"label": "sku"}.
        labelled: whether images have a class; False lists all in a folder and below.
    """
    if not labelled:
        paths, left_out = walk_images(source)
        listing = Listing([ImageFile(path, "") for path in paths], left_out, source)
        expected = f"{', '.join(readable_formats())} files or shards"
    elif source.is_dir():
        listing = _in_folders(source, nested)
        expected = "one sub-folder a class, with images in it"
    elif source.is_file():
        listing = _in_list(source, renamed)
        expected = "lines of path,label"
    else:
        raise DistapError("data.missing", f"{source}: no such folder or CSV file")
    if not listing.images:
        causes = "".join(f"\nleft out: {line}" for line in counted(listing.left_out))
        raise DistapError(
            "data.empty", f"{source}: the data set is empty; expected {expected}{causes}"
        )
    return listing


def sort_classes(names: Iterable[str]) -> list[str]:
    """Return the class names, each once, in the order of their numbers.

    Whole numbers are sorted by value, other names alphabetically.
    """
    return sorted(set(names), key=lambda name: (len(name) if name.isdigit() else 0, name))


def _in_folders(source: Path, nested: Nested | None) -> Listing:
    """List the images below a folder by the folders that each is in."""
    paths, left_out = walk_images(source)
    # A class whose folder's name is composed in some paths and not in others is one class.
    folders_of = {
        path: tuple(map(composed, path.parts[len(source.parts) : -1])) for path in sorted(paths)
    }
    for path in [path for path, folders in folders_of.items() if not folders]:
        left_out.append(Skipped(str(path), "loose images, in no class's folder"))
        del folders_of[path]
    left_out += _empty_folders(source, {folders[0] for folders in folders_of.values()})
    if nested is None:
        _refuse_deep(source, folders_of)
    if nested in ("leaf", "levels"):
        _refuse_ambiguous(source, set(folders_of.values()))
    images = [_image_in(path, folders, nested) for path, folders in folders_of.items()]
    return Listing(images, left_out, source)


def _empty_folders(source: Path, filled: set[str]) -> Iterator[Skipped]:
    with suppress(OSError):  # walk_images reports a folder that cannot be read
        for folder in sorted(source.iterdir()):
            is_hidden = folder.name.startswith(".")
            if folder.is_dir() and not is_hidden and composed(folder.name) not in filled:
                yield Skipped(str(folder), "class folders without an image")


def _refuse_deep(source: Path, folders_of: Mapping[Path, Levels]) -> None:
    """Raise a DistapError if images lie in folders of folders, any of which may be the class."""
    for path, folders in folders_of.items():
        if len(folders) > 1:
            raise DistapError(
                "data.nested_folders",
                f"{source}: images lie in folders of folders, such as {path.relative_to(source)}:"
                f" say with `distap data pack --nested` what its class is: `leaf` {folders[-1]!r},"
                f" `top` {folders[0]!r}, `path` {'/'.join(folders)!r}; `merge` is leaf with folders"
                " of one name as one class, `levels` leaf with those above as coarser classes",
            )


def _refuse_ambiguous(source: Path, paths: set[Levels]) -> None:
    """Raise a DistapError if two folders with images have one name."""
    first_of: dict[str, Levels] = {}
    for folders in sorted(paths):
        first = first_of.setdefault(folders[-1], folders)
        if first != folders:
            raise DistapError(
                "data.ambiguous_folders",
                f"{source}: two folders have one name: {'/'.join(first)} and {'/'.join(folders)}:"
                " `--nested merge` of `distap data pack` makes one class, `path` two",
            )


def _image_in(path: Path, folders: Levels, nested: Nested | None) -> ImageFile:
    """Return an image with the class that its folders name, outermost first."""
    if nested == "top":
        return ImageFile(path, folders[0])
    if nested == "path":
        return ImageFile(path, "/".join(folders))
    return ImageFile(path, folders[-1], folders[-2::-1] if nested == "levels" else ())


def _in_list(source: Path, renamed: Mapping[str, str]) -> Listing:
    """List the images of a CSV file by its columns, without those that have no class."""
    places, further, lines = read_list(source, renamed)
    images = list[ImageFile]()
    left_out = list[Skipped]()
    line_of = dict[Path, ListLine]()
    for line in lines:
        row = {column: line[place] for column, place in places.items()}
        cells = tuple(
            (name, as_line(composed(line[place])) if line[place] else "")
            for name, place in further.items()
        )
        image = _listed_image(source, line, row)._replace(columns=cells)
        first = line_of.setdefault(image.path, line)
        if first is not line:
            if list(map(composed, first.cells)) != list(map(composed, line.cells)):
                raise line.wrong(
                    f"{image.path} is on line {first.number} already, with other cells"
                )
            left_out.append(Skipped(str(image.path), "lines that repeat another"))
        elif not image.class_name:
            reason = (
                f"images without a class: the label on line {line.number} is"
                f" {as_line(row['label'])!r}"
            )
            left_out.append(Skipped(str(image.path), reason))
        else:
            _require_folder_name(line, image.split)
            images.append(image)

    without = sorted(image.path.name for image in images if not image.split)
    if without and len(without) < len(images):
        raise DistapError(
            "data.mixed_splits",
            f"{source}: {len(without)} images are of no split, such as {without[0]}; others are"
            " of one",
        )
    _warn_of_codes(source, {image.class_name for image in images})
    listing = Listing(_without_long_columns(source, images), left_out, source.parent)
    _refuse_repeated_keys(source, listing)
    return listing


def _listed_image(source: Path, line: ListLine, row: Mapping[str, str]) -> ImageFile:
    """Return the image on a line, whose cells `row` has by column; "" stands for no class."""
    if not is_line(row["path"]):
        raise line.wrong(f"{row['path'][:60]!r} is no path, which is one line of text")
    split, *levels = (
        class_name_at(f"{line.where}, column {column}", row.get(column))
        for column in ("split", *(column for column in LEVELS if column in row))
    )
    return ImageFile(
        path=as_on_disk(source.parent / row["path"]),
        class_name=class_name_at(line.where, row["label"]),
        levels=tuple(levels),
        split=split,
        key=composed(row.get("key", "")),
    )


def _require_folder_name(line: ListLine, split: str) -> None:
    is_name = Path(split).name == split and not split.startswith(".") and is_line(split)
    if split and not is_name:
        raise line.wrong(f"split {split!r} cannot name a folder of shards")


def _without_long_columns(source: Path, images: list[ImageFile]) -> list[ImageFile]:
    """Drop columns of descriptions and the like, which an index holds as wide as the longest."""
    long = {name for image in images for name, cell in image.columns if len(cell) > LONGEST_CELL}
    if not long:
        return images
    logger.warning(
        "%s: columns with cells of more than %d letters are dropped: %s",
        source,
        LONGEST_CELL,
        ", ".join(sorted(long)),
    )
    return [
        image._replace(columns=tuple(cell for cell in image.columns if cell[0] not in long))
        for image in images
    ]


def _refuse_repeated_keys(source: Path, listing: Listing) -> None:
    """Raise a DistapError if two images have one name, or the name of one is no line of text."""
    image_of = dict[tuple[str, str], ImageFile]()
    for image in listing.images:
        key = listing.name_of(image)
        first = image_of.setdefault((image.split, key), image)
        if first is not image or not is_line(key):
            raise DistapError(
                "data.repeated_key",
                f"{source}: the key {key[:200]!r} of {image.path} is no line of text, or that of"
                f" {first.path} too: give each image another one in the column key",
            )


def _warn_of_codes(source: Path, names: set[str]) -> None:
    codes = [name for name in names if name[0] == "0" and name.isdecimal()]
    alike = min((code for code in codes if code.lstrip("0") in names), default=None)
    if alike:
        logger.warning(
            "%s: labels that differ by zeros in front are different classes, such as %s and %s",
            source,
            alike,
            alike.lstrip("0"),
        )


def levels_of_each_class(images: Sequence[ImageFile]) -> dict[str, Levels]:
    """Return the coarser classes that hold each class, by its name.

    Raises a DistapError if levels cross, or a name cannot stand in classes.txt.
    """
    levels = nesting(image[:3] for image in images)
    # classes.txt has tabs between names.
    for name in chain(levels, filter(None, chain(*levels.values()))):
        if not (is_line(name) and name == name.strip()):
            raise DistapError(
                "data.wrong_class_name",
                f"{name[:60]!r} cannot name a class: tabs, line breaks, control characters, outer"
                " spaces and bytes that are no UTF-8 are not allowed",
            )
    return levels
