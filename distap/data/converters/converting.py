"""Converting a data set: its lists are read, what is missing is told, and each split becomes shards."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from distap.data.converters.dataset import Dataset, Split
from distap.data.converters.lists import MissingListError
from distap.data.shards.indexing import Skipped
from distap.data.shards.packing import pack_images
from distap.data.shards.progress import Track, untracked
from distap.data.shards.sources import ImageFile
from distap.errors import DistapError
from distap.storage.atomic import write_whole

RECORD_FILE = "dataset.json"
MISSING_FILE = "missing.txt"
SHOWN = 5  # missing images that a message names
LOOKERS, LOOKED_AT_ONCE = 32, 256  # asking a network file system for files is all waiting

T = TypeVar("T")


@dataclass(frozen=True)
class Listed:
    """What the lists say of a split, compared with the images that are there."""

    split: Split
    images: int  # that the list names, each once
    classes: int
    repeated: int  # lines that name an image for the second time
    present: tuple[ImageFile, ...]
    missing: tuple[str, ...]  # paths relative to the source folder
    digest: str  # of what is present

    @property
    def differs(self) -> bool:
        """Whether the list is not the published one."""
        return bool(self.split.published) and not any(
            c.agrees(self.images, self.classes) for c in self.split.published
        )


@dataclass(frozen=True)
class Converted:
    """A split that is in shards now, and what was left out of it."""

    listed: Listed
    images: int
    classes: int
    damaged: tuple[Skipped, ...]
    kept: bool  # it had been converted before


def convert(
    dataset: Dataset,
    source: Path,
    output: Path,
    *,
    only: Sequence[str] = (),
    strict: bool = False,
    images_per_shard: int = 1000,
    shuffle: int | None = None,
    workers: int = 1,
    track: Track = untracked,
) -> list[Converted]:
    """Pack each split of a data set into output/SPLIT; one that is there already, from the same list, is kept.

    Beside the splits go dataset.json (what was converted), missing.txt (images that lists name and that are not
    there: split, tab, path) and the JSON files that splits have.

    Args:
        dataset: one of `DATASETS`.
        source: folder of the files as the authors distribute them.
        output: folder of the splits, made if need be.
        only: names of splits; all that are not on request where it is empty.
        strict: missing images are an error.
        images_per_shard, shuffle, workers: as `pack_images` has them.
        track: wraps a loop to show its progress.
    Raises:
        DistapError: there is no such split, a list is missing or has a wrong line, no image of a split is there, or
            the output has something else in it.
    """
    if not source.is_dir():
        raise DistapError(f"{source}: no such folder; {_remedy(dataset)}")
    if output.resolve() == source.resolve():
        raise DistapError(f"{output}: the output must be another folder than the source")
    splits = _chosen(dataset, only)
    try:
        listed = [_look(split, source, track) for split in splits]
        records = [(split.record.file, split.record.contents(source)) for split in splits if split.record]
    except MissingListError as error:
        raise DistapError(f"{error}; {_remedy(dataset)}") from error
    output.mkdir(parents=True, exist_ok=True)
    _write_missing(output / MISSING_FILE, listed)
    _require_images(listed, output / MISSING_FILE, strict)
    done = _read_record(output / RECORD_FILE, dataset)
    converted = []
    for part in listed:
        converted.append(_pack(part, output, done, images_per_shard, shuffle, workers, track))
        write_whole(output / RECORD_FILE, json.dumps(done, indent=2) + "\n")
    for file, contents in records:
        write_whole(output / file, json.dumps(contents, indent=1) + "\n")
    return converted


def _chosen(dataset: Dataset, only: Sequence[str]) -> list[Split]:
    known = {split.name: split for split in dataset.splits}
    for name in only:
        if name not in known:
            raise DistapError(f"{dataset.title} has no split {name!r}; expected some of {', '.join(known)}")
    return [split for split in dataset.splits if (split.name in only if only else not split.on_request)]


def _remedy(dataset: Dataset) -> str:
    return (
        f"{dataset.title} is offered at {dataset.site}; "
        "distap/data/converters/README.md says which files are needed and where they have to lie"
    )


def _look(split: Split, source: Path, track: Track) -> Listed:
    """Read the lists of a split and look for its images."""
    lines = 0
    images: dict[Path, ImageFile] = {}
    for image in split.images(source):
        lines += 1
        # An image that is packed twice would be its own positive.
        images.setdefault(image.path, image)
    paths = list(images)
    parts = [paths[start : start + LOOKED_AT_ONCE] for start in range(0, len(paths), LOOKED_AT_ONCE)]
    with ThreadPoolExecutor(LOOKERS) as pool:
        looked = track(pool.map(_are_there, parts), f"{split.name}: looking for images", len(parts))
        there = list(chain.from_iterable(looked))
    present = tuple(image for image, is_there in zip(images.values(), there, strict=True) if is_there)
    return Listed(
        split,
        len(images),
        len({image.class_name for image in images.values()}),
        lines - len(images),
        present,
        tuple(str(path.relative_to(source)) for path, is_there in zip(paths, there, strict=True) if not is_there),
        _digest(source, present),
    )


def _are_there(paths: Sequence[Path]) -> list[bool]:
    """Which of the files exist."""
    return [os.path.isfile(path) for path in paths]  # noqa: PTH113 - False where a name is too long as well


def _require_images(listed: Iterable[Listed], file: Path, strict: bool) -> None:
    for part in listed:
        if part.missing and (strict or not part.present):
            shown = ", ".join(part.missing[:SHOWN])
            raise DistapError(
                f"{part.split.name}: {len(part.missing):,} of its {part.images:,} images are missing; the first: "
                f"{shown}; {file} names all"
            )
        if not part.images:
            raise DistapError(f"{part.split.name}: its list names no image")


def _pack(
    part: Listed,
    output: Path,
    done: dict[str, Any],
    images_per_shard: int,
    shuffle: int | None,
    workers: int,
    track: Track,
) -> Converted:
    name, folder = part.split.name, output / part.split.name
    stamp = {"digest": part.digest, "images_per_shard": images_per_shard, "shuffle": shuffle}
    before = done["splits"].get(name)
    if folder.is_dir() and any(folder.iterdir()):
        if before is None or any(before.get(key) != value for key, value in stamp.items()):
            raise DistapError(
                f"{folder}: there is something already, and not from these images; "
                "choose another output, or remove it"
            )
        damaged = tuple(Skipped(**image) for image in before["damaged"])
        return Converted(part, before["images"], before["classes"], damaged, kept=True)

    def named(items: Iterable[T], description: str, total: int, /) -> Iterable[T]:
        return track(items, f"{name}: {description}", total)

    index, skipped = pack_images(part.present, folder, images_per_shard, named, shuffle=shuffle, workers=workers)
    done["splits"][name] = {
        **stamp,
        "fingerprint": index.fingerprint,
        "images": len(index),
        "classes": len(index.class_name),
        "listed": {"images": part.images, "classes": part.classes},
        "missing": len(part.missing),
        "damaged": [asdict(image) for image in skipped],
    }
    return Converted(part, len(index), len(index.class_name), tuple(skipped), kept=False)


def _digest(source: Path, images: Iterable[ImageFile]) -> str:
    """Stands for the images of a split; the same wherever the source folder lies."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(json.dumps([str(image.path.relative_to(source)), image.class_name, image.group]).encode())
    return digest.hexdigest()


def _read_record(path: Path, dataset: Dataset) -> dict[str, Any]:
    if not path.exists():
        return {"dataset": dataset.title, "site": dataset.site, "splits": {}}
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
        same, splits = record["dataset"] == dataset.title, dict(record["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistapError(f"{path}: cannot be read: {error}; choose another output, or remove it") from error
    if not same:
        raise DistapError(f"{path.parent}: {record['dataset']} is there already; choose another output")
    return record | {"splits": splits}


def _write_missing(path: Path, listed: Sequence[Listed]) -> None:
    """Write the missing images of these splits; those of splits that were converted before stay."""
    replaced = {part.split.name for part in listed}
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [line for line in before if line.split("\t")[0] not in replaced]
    lines += [f"{part.split.name}\t{name}" for part in listed for name in part.missing]
    write_whole(path, "".join(f"{line}\n" for line in lines))
