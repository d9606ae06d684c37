"""List images to pack into shards: a folder with a sub-folder per class, or a CSV file.

Every file that is found is either listed as an image or reported as left out, with the reason.
"""

import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from distap.data.images.boxes import Box
from distap.data.images.formats import readable_formats
from distap.data.labels import class_name_at, nesting
from distap.data.shards.image_folders import Skipped, counted, walk_images
from distap.data.shards.tables import ListLine, read_list
from distap.errors import DistapError, logger
from distap.randomness import permutation
from distap.storage.names import as_on_disk, composed
from distap.storage.texts import as_line, is_line

Nested = Literal["top", "leaf", "merge", "path", "levels"]
STAT_THREADS = 32
STAT_CHUNK = 256
NOT_THERE = "listed images that are not there"


class ImageFile(NamedTuple):
    path: Path
    class_name: str
    # the coarser classes that hold the class, finer first; "" for none
    levels: tuple[str, ...] = ()
    # part to pack, upright, in pixels; what lies outside the image is cut off
    box: Box | None = None
    part: str = ""  # folder of shards to pack it into, if its list says so


def look_at(path: Path) -> os.stat_result | Skipped:
    """Return the status of a file; or, if it is a broken link or no file, Skipped."""
    try:
        status = path.stat()
    except OSError as error:
        told = (
            NOT_THERE
            if isinstance(error, FileNotFoundError)
            else f"files that cannot be read: {error.strerror}"
        )
        is_link = os.path.islink(path)  # noqa: PTH114 - Path.is_symlink may raise
        return Skipped(str(path), "links to nothing" if is_link else told)
    return status if stat.S_ISREG(status.st_mode) else Skipped(str(path), "no regular files")


def look_at_all(
    images: Sequence[ImageFile],
) -> tuple[list[tuple[ImageFile, os.stat_result]], list[Skipped]]:
    """Return the images that are files, with their status, and apart from them the others."""
    # a network file system answers slowly, but many questions at once
    with ThreadPool(STAT_THREADS) as pool:
        looks = pool.map(look_at, [image.path for image in images], STAT_CHUNK)
        pool.close()
        pool.join()  # so that no thread is left when processes are forked
    found = zip(images, looks, strict=True)
    sound = [(image, look) for image, look in found if not isinstance(look, Skipped)]
    return sound, [look for look in looks if isinstance(look, Skipped)]


class Listing(NamedTuple):
    """The images of a source in order, and its other files."""

    images: Sequence[ImageFile]
    left_out: Sequence[Skipped]
    root: Path  # that the names of images are relative to

    def name_of(self, image: ImageFile) -> str:
        """Return the image's path within the source, as one line of text."""
        path = image.path.absolute() if self.root.is_absolute() else image.path
        return as_line(
            path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        )

    def by_part(self) -> dict[str, "Listing"]:
        """Split the listing into its parts (such as train) by name; left-out files stay with the
        first part.
        """
        found: dict[str, list[ImageFile]] = defaultdict(list)
        for image in self.images:
            found[image.part].append(image)
        first = min(found, default="")
        return {
            name: Listing(found[name], self.left_out if name == first else (), self.root)
            for name in sorted(found)
        }

    def halves(self, share: float) -> "Listing":
        """Name the parts of the images: a share of the classes, drawn at random, is `validation`,
        others `train`.
        """
        names = sort_classes(image.class_name for image in self.images)
        count = round(share * len(names))
        if not 0 < count < len(names):
            raise DistapError(
                f"--split {share:g} of {len(names)} classes leaves one side without any"
            )
        chosen = {names[place] for place in permutation(len(names), 0)[:count]}
        parts = ("validation" if image.class_name in chosen else "train" for image in self.images)
        return self._replace(
            images=[one._replace(part=part) for one, part in zip(self.images, parts, strict=True)]
        )


def list_images(
    source: Path,
    nested: Nested | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    labelled: bool = True,
) -> Listing:
    """List the images of a folder with a sub-folder per class, or of a CSV file.

    The columns are found by their names: path or filename, label or class, and optionally level1
    (or group), level2 and so on (coarser classes that hold the class), and split, which cuts the
    images into parts; others are ignored. A CSV has commas, semicolons or tabs between them. Paths
    are relative to the file. Files without a class (see `class_name`) are left out; whether a
    listed file is there is seen when it is packed.

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
        raise DistapError(f"{source}: no such folder or CSV file")
    if not listing.images:
        told = "".join(f"\nleft out: {line}" for line in counted(listing.left_out))
        raise DistapError(f"{source}: the data set is empty; expected {expected}{told}")
    return listing


def sort_classes(names: Iterable[str]) -> list[str]:
    """Sort class names in the order of their numbers: whole numbers by value, other names
    alphabetically.
    """
    return sorted(set(names), key=lambda name: (len(name) if name.isdigit() else 0, name))


def _in_folders(source: Path, nested: Nested | None) -> Listing:
    paths, left_out = walk_images(source)
    # The folders that each is in: of a class whose name some of them compose and others do not, all
    # are one class.
    found = {
        path: tuple(map(composed, path.parts[len(source.parts) : -1])) for path in sorted(paths)
    }
    for loose in [path for path, folders in found.items() if not folders]:
        left_out.append(Skipped(str(loose), "loose images, in no class's folder"))
        del found[loose]
    filled = {folders[0] for folders in found.values()}
    with suppress(OSError):  # walk_images says that the folder cannot be read
        for folder in sorted(source.iterdir()):
            if (
                folder.is_dir()
                and composed(folder.name) not in filled
                and not folder.name.startswith(".")
            ):
                left_out.append(Skipped(str(folder), "class folders without an image"))
    deep = next((path for path, folders in found.items() if len(folders) > 1), None)
    if deep is not None and nested is None:
        top, *_, leaf = found[deep]
        raise DistapError(
            f"{source}: images lie in folders of folders, such as {deep.relative_to(source)}: say"
            f" with `distap data pack --nested` what its class is: `leaf` {leaf!r}, `top` {top!r},"
            f" `path` {'/'.join(found[deep])!r}; `merge` is leaf with folders of one name as one"
            " class, `levels` leaf with those above as coarser classes"
        )
    known: dict[str, tuple[str, ...]] = {}
    for folders in sorted(set(found.values()) if nested in ("leaf", "levels") else ()):
        other = known.setdefault(folders[-1], folders)
        if other != folders:
            both = "/".join(other)
            remedy = "`--nested merge` of `distap data pack` makes one class, `path` two"
            raise DistapError(
                f"{source}: two folders have one name: {both} and {'/'.join(folders)}: {remedy}"
            )
    named = {"top": lambda folders: folders[0], "path": "/".join}.get(
        nested or "", lambda folders: folders[-1]
    )
    with_levels = slice(-2, None, -1) if nested == "levels" else slice(0)
    images = [
        ImageFile(path, named(folders), folders[with_levels]) for path, folders in found.items()
    ]
    return Listing(images, left_out, source)


def _in_list(source: Path, renamed: Mapping[str, str]) -> Listing:
    """List the images of a CSV file by its columns, without those that have no class."""
    places, lines = read_list(source, renamed)
    wanted = ["label", "split", *(column for column in places if column.startswith("level"))]
    found = list[ImageFile]()
    left_out = list[Skipped]()
    seen = dict[Path, ListLine]()
    for line in lines:
        row = {column: line.cells[place] for column, place in places.items()}
        if not is_line(row["path"]):
            raise line.wrong(f"{row['path'][:60]!r} is no path, which is one line of text")
        path = as_on_disk(source.parent / row["path"])
        where = (
            f"{line.where}{'' if column == 'label' else f', column {column}'}" for column in wanted
        )
        name, split, *above = map(class_name_at, where, map(row.get, wanted))
        first = seen.setdefault(path, line)
        if first is not line:
            if list(map(composed, first.cells)) != list(map(composed, line.cells)):
                raise line.wrong(f"{path} is on line {first.number} already, with other cells")
            left_out.append(Skipped(str(path), "lines that repeat another"))
            continue
        if not name:
            told = (
                f"images without a class: the label on line {line.number} is"
                f" {as_line(row['label'])!r}"
            )
            left_out.append(Skipped(str(path), told))
            continue
        if split and (Path(split).name != split or split.startswith(".") or not is_line(split)):
            raise line.wrong(f"split {split!r} cannot name a folder of shards")
        found.append(ImageFile(path, name, tuple(above), part=split))
    lacking = sorted(image.path.name for image in found if not image.part)
    if len(lacking) not in (0, len(found)):
        raise DistapError(
            f"{source}: {len(lacking)} images are of no split, such as {lacking[0]}; others are"
            " of one"
        )
    names = {image.class_name for image in found}
    codes = [
        name
        for name in names
        if name.isdecimal() and name.startswith("0") and name.lstrip("0") in names
    ]
    if codes:
        told = f"such as {min(codes)} and {min(codes).lstrip('0')}"
        logger.warning(
            "%s: labels that differ by zeros in front are different classes, %s", source, told
        )
    return Listing(found, left_out, source.parent)


def levels_of_each_class(images: Sequence[ImageFile]) -> dict[str, tuple[str, ...]]:
    """Return coarser classes by class; raise a DistapError if levels cross, or a name is no cell of
    classes.txt.
    """
    levels = nesting(image[:3] for image in images)
    # classes.txt has tabs between them
    for name in chain(levels, filter(None, chain(*levels.values()))):
        if not (is_line(name) and name == name.strip()):
            unfit = (
                "tabs, line breaks, control characters, outer spaces and bytes that are no UTF-8"
            )
            raise DistapError(f"{name[:60]!r} cannot name a class: {unfit} are not allowed")
    return levels
