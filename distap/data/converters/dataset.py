"""Convert the files that the authors of a data set distribute into shards."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from distap.data.shards.image_files import ImageFile, Listing
from distap.data.shards.image_folders import Skipped
from distap.data.shards.indexing import Packed
from distap.data.shards.packing import pack_parts
from distap.data.shards.parallel import Track, untracked
from distap.data.shards.tables import ListLine, read_lines
from distap.errors import DistapError, logger, suggestion
from distap.storage.atomic import require_free
from distap.storage.texts import parsed_json

# next to the splits of a data set with a list of matches for each query
GROUND_TRUTH_FILE = "ground_truth.json"

Images = Iterator[ImageFile]
Truth = dict[str, Any]  # contents of GROUND_TRUTH_FILE


class Count(NamedTuple):
    """Number of images and classes in the published list; None if no publication states it."""

    images: int | None = None
    classes: int | None = None

    def agrees(self, listed: "Count") -> bool:
        return all(number in (None, count) for number, count in zip(self, listed, strict=True))

    def __str__(self) -> str:
        return ", ".join(
            f"{number:,} {unit}"
            for number, unit in zip(self, self._fields, strict=True)
            if number is not None
        )


@dataclass(frozen=True)
class Split:
    name: str  # folder of its shards
    file: str  # the list of its images
    images: Callable[[Path, Path], Images]  # from the source's folder and the list
    published: tuple[Count, ...] = ()  # several if the authors' paper and files differ
    truth: Callable[[Path], Truth] | None = None  # from the list


class Dataset:
    """A published data set, whose lists are in the first of `folders` that has them."""

    def __init__(self, *splits: Split, folders: tuple[str, ...] = ("",)) -> None:
        self.splits = splits
        self.folders = folders


DATASETS: dict[str, Dataset] = {}  # by name; the other modules here add theirs


def ground_truth(
    dataset: str,
    figures: list[str],
    queries: list[Truth],
    query: str = "query",
    gallery: str = "gallery",
    **tables: Any,
) -> Truth:
    """Return the contents of GROUND_TRUTH_FILE; `query` and `gallery` are the names of splits."""
    return {
        "dataset": dataset,
        "figures": figures,
        **tables,
        "query": [query],
        "gallery": [gallery],
        "queries": queries,
    }


def read_table(
    file: Path, columns: Sequence[str], separator: str | None = None, *, heading: int = 1
) -> Iterator[ListLine]:
    """Yield the lines of a table below its heading, which has to begin with these columns.

    `heading` is the number of its line, from 1; 0 for a table without one.
    """
    lines = read_lines(file, separator)
    names = columns
    for line in islice(lines, heading):
        names = line.cells
    if list(names[: len(columns)]) != list(columns):
        raise line.wrong(f"expected the heading {(separator or ' ').join(columns)!r}")
    for line in lines:
        yield line.of_width(names)


def read_objects(file: Path, *keys: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of these keys from the objects in a JSON list.

    Raises a DistapError if an object lacks any.
    """
    try:
        objects = parsed_json(file.read_bytes(), list)
        yield from [tuple(entry[key] for key in keys) for entry in objects]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DistapError(
            "data.wrong_list",
            f"{file}: no list of objects with {', '.join(keys)}: {error!r}",
        ) from error


def convert(
    name: str,
    source: Path,
    output: Path,
    *,
    only: Sequence[str] = (),
    track: Track = untracked,
    **layout: Any,
) -> dict[str, Packed]:
    """Convert the splits of DATASETS[name] into shards in output/SPLIT.

    Returns the index of each split, and the listed images that are missing, damaged or listed
    again. If the data set has ground truth, it is written as GROUND_TRUTH_FILE.

    Args:
        source: folder of the files as the authors distribute them.
        output: folder that must not exist, or be empty, and appears when everything is in it.
        only: names of the splits to convert; by default all.
        layout: see `pack_parts`.
    """
    if name not in DATASETS:
        raise DistapError(
            "data.unknown_data_set",
            f"no data set is called {name!r}; {suggestion(name, DATASETS)}",
        )
    dataset = DATASETS[name]
    names = [split.name for split in dataset.splits]
    for wanted in only:
        if wanted not in names:
            raise DistapError(
                "data.unknown_split",
                f"{name} has no split {wanted!r}; expected some of {', '.join(names)}",
            )
    require_free(output)
    listings = dict[str, Listing]()
    files = dict[str, str]()
    try:
        if not source.is_dir():
            raise DistapError("data.missing", f"{source}: no such folder")
        for split in dataset.splits:
            if split.name in (only or names):
                listings[split.name], truth = _read_split(split, source, dataset.folders)
                if truth is not None:
                    files[GROUND_TRUTH_FILE] = json.dumps(truth, indent=1) + "\n"
    except DistapError as error:
        raise DistapError(
            error.code,
            f"{error}; docs/guides/data-set-files.md says where {name} is offered, which files are"
            " needed and where they must lie",
        ) from error
    packed = pack_parts(listings, output, track=track, files=files, **layout)
    return dict(zip(listings, packed, strict=True))


def _read_split(split: Split, source: Path, folders: Sequence[str]) -> tuple[Listing, Truth | None]:
    """Return the images of a split's list, each once, and the truth of its queries if any."""
    file = _find(source, split.file, folders)
    images = dict[tuple[Path, Any], ImageFile]()
    left_out = list[Skipped]()
    try:
        for image in split.images(source, file):
            # packed twice, it would be its own positive
            if images.setdefault((image.path, image.box), image) is not image:
                name = str(image.path.relative_to(source))
                left_out.append(Skipped(name, "images that are listed again"))
        truth = split.truth(file) if split.truth else None
    except (LookupError, TypeError, ValueError) as error:
        raise DistapError(
            "data.wrong_list", f"{file}: not as its authors distribute it: {error!r}"
        ) from error
    if not images:
        raise DistapError("data.empty", f"{split.name}: its list names no image")
    _warn_if_unpublished(split, images.values())
    return Listing(list(images.values()), left_out, source), truth


def _find(source: Path, name: str, folders: Sequence[str]) -> Path:
    first, *others = (source / folder / name for folder in folders)
    for place in (first, *others):
        if place.exists():
            return place
    elsewhere = "".join(f", nor {place.relative_to(source)}" for place in others)
    raise DistapError("data.missing", f"{first}: no such file{elsewhere}")


def _warn_if_unpublished(split: Split, images: Collection[ImageFile]) -> None:
    listed = Count(len(images), len({image.class_name for image in images}))
    if split.published and not any(count.agrees(listed) for count in split.published):
        logger.warning(
            "%s differs from the published split: its list names %s, published are %s",
            split.name,
            listed,
            ", or ".join(map(str, split.published)),
        )
