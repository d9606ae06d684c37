"""Declare data sets, read the list files that their authors distribute, and pack the listed images
into shards.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distap.data.shards.image_files import ImageFile, Listing
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Index
from distap.data.shards.packing import pack_parts
from distap.data.shards.parallel import Track, untracked
from distap.data.shards.tables import ListLine, read_lines
from distap.errors import DistapError, logger, suggestion
from distap.storage.atomic import require_free
from distap.storage.texts import parsed_json

# next to the splits of a data set with a list of matches for each query
GROUND_TRUTH_FILE = "ground_truth.json"


class Count(NamedTuple):
    """Number of images and classes in the published list; None if no publication states it."""

    images: int | None = None
    classes: int | None = None

    def agrees(self, found: "Count") -> bool:
        return all(known in (None, counted) for known, counted in zip(self, found, strict=True))

    def __str__(self) -> str:
        return ", ".join(
            f"{n:,} {unit}" for n, unit in zip(self, self._fields, strict=True) if n is not None
        )


@dataclass(frozen=True)
class Split:
    name: str  # folder of its shards
    file: str  # the list of its images
    # yields the images in the list, from (source folder, list)
    images: Callable[[Path, Path], Iterator[ImageFile]]
    published: tuple[Count, ...] = ()  # several if the authors' paper and files differ
    # makes the contents of GROUND_TRUTH_FILE of the list
    truth: Callable[[Path], dict[str, Any]] | None = None


class Dataset:
    """A published data set; `folders` of the source may hold its lists."""

    def __init__(self, *splits: Split, folders: tuple[str, ...] = ("",)) -> None:
        self.splits = splits
        self.folders = folders


DATASETS: dict[str, Dataset] = {}  # by name; the other modules here add theirs


def ground_truth(
    queries: list[dict[str, Any]], gallery: str = "gallery", **about: Any
) -> dict[str, Any]:
    """Return the contents of GROUND_TRUTH_FILE for the splits `query` and `gallery`."""
    return {**about, "query": ["query"], "gallery": [gallery], "queries": queries}


def read_table(
    file: Path, columns: Sequence[str], separator: str | None = None, *, heading: int = 1
) -> Iterator[ListLine]:
    """Yield the lines of a table below its heading, a line of this number, which has to begin with
    these columns.
    """
    found = columns
    for place, line in enumerate(read_lines(file, separator), 1):
        if place == heading:
            found = line.cells
            if list(found[: len(columns)]) != list(columns):
                raise line.wrong(f"expected the heading {(separator or ' ').join(columns)!r}")
        if place > heading:
            yield line.of_width(found)


def read_objects(file: Path, *keys: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of these keys from the objects in a JSON list; raise a DistapError if one
    lacks any.
    """
    try:
        yield from [tuple(one[key] for key in keys) for one in parsed_json(file.read_bytes(), list)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DistapError(
            f"{file}: no list of objects with {', '.join(keys)}: {error!r}"
        ) from error


def convert(
    name: str,
    source: Path,
    output: Path,
    *,
    only: Sequence[str] = (),
    track: Track = untracked,
    **layout: Any,
) -> dict[str, tuple[Index, list[Skipped]]]:
    """Convert the splits of DATASETS[name] into shards in output/SPLIT, with a JSON file for some
    of the splits.

    Returns the index of each split, and the listed images that are not there, are damaged, or are
    listed again.

    Args:
        source: folder of the files as the authors distribute them.
        output: folder that must not exist, or be empty, and appears when everything is in it.
        only: names of the splits to convert; by default all.
        layout: see `pack_parts`.
    """
    if name not in DATASETS:
        raise DistapError(f"no data set is called {name!r}; {suggestion(name, DATASETS)}")
    dataset = DATASETS[name]
    remedy = (
        f"docs/guides/data-set-files.md says where {name} is offered, which files are needed and"
        " where they must lie"
    )
    if not source.is_dir():
        raise DistapError(f"{source}: no such folder; {remedy}")
    names = [split.name for split in dataset.splits]
    for wanted in only:
        if wanted not in names:
            raise DistapError(
                f"{name} has no split {wanted!r}; expected some of {', '.join(names)}"
            )
    require_free(output)
    chosen = [split for split in dataset.splits if split.name in (only or names)]
    listed = dict[str, Listing]()
    truths = dict[str, str]()
    try:
        for split in chosen:
            places = [source / folder / split.file for folder in dataset.folders]
            file = next((place for place in places if place.exists()), None)
            if file is None:
                others = "".join(f", nor {place.relative_to(source)}" for place in places[1:])
                raise DistapError(f"{places[0]}: no such file{others}")
            listed[split.name] = _listing(split, source, file)
            if split.truth:
                truths[GROUND_TRUTH_FILE] = json.dumps(split.truth(file), indent=1) + "\n"
    except DistapError as error:
        raise DistapError(f"{error}; {remedy}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise DistapError(
            f"{file}: not as its authors distribute it: {error!r}; {remedy}"
        ) from error
    for split in chosen:
        images = listed[split.name].images
        found = Count(len(images), len({image.class_name for image in images}))
        known = split.published
        if not images:
            raise DistapError(f"{split.name}: its list names no image")
        if known and not any(count.agrees(found) for count in known):
            told = "%s differs from the published split: its list names %s, published are %s"
            logger.warning(told, split.name, found, ", or ".join(map(str, known)))
    return dict(
        zip(listed, pack_parts(listed, output, track=track, files=truths, **layout), strict=True)
    )


def _listing(split: Split, source: Path, file: Path) -> Listing:
    """Return the images of a split's list, each once."""
    images = dict[tuple[Path, Any], ImageFile]()
    left_out = list[Skipped]()
    for image in split.images(source, file):
        place = image.path, image.box
        # packed twice, it would be its own positive
        if images.setdefault(place, image) is not image:
            left_out.append(
                Skipped(str(image.path.relative_to(source)), "images that are listed again")
            )
    return Listing(list(images.values()), left_out, source)
