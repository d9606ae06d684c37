"""Convert a data set of the papers: read its lists, report missing images, and pack each split into shards."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

from distap.data.converters import landmarks, metric_learning, revisited
from distap.data.converters.dataset import Count, Dataset, MissingListError, Split, find_list
from distap.data.shards.image_files import ImageFile
from distap.data.shards.image_folders import Skipped
from distap.data.shards.packing import pack
from distap.data.shards.parallel import Track, ask_files, untracked
from distap.errors import DistapError
from distap.storage.atomic import write_whole

RECORD_FILE = "dataset.json"
MISSING_FILE = "missing.txt"
SHOWN = 5  # missing images that a message names

DATASETS: dict[str, Dataset] = {
    "sop": metric_learning.STANFORD_ONLINE_PRODUCTS,
    "cub": metric_learning.CUB,
    "inaturalist": metric_learning.INATURALIST,
    "vehicleid": metric_learning.VEHICLE_ID,
    "inshop": metric_learning.IN_SHOP,
    "landmarks-clean": landmarks.LANDMARKS_CLEAN,
    "sfm-120k": revisited.SFM_120K,
    "gldv2": landmarks.GOOGLE_LANDMARKS,
    "roxford5k": revisited.OXFORD,
    "rparis6k": revisited.PARIS,
    "revisitop1m": revisited.DISTRACTORS,
}


@dataclass(frozen=True)
class Listed:
    """The list of a split, and which of its images were found or are missing."""

    split: Split
    images: int  # in the list, each counted once
    classes: int
    repeated: int  # lines that name an image again
    present: tuple[ImageFile, ...]
    missing: tuple[str, ...]  # paths relative to the source folder
    digest: str  # of the present images; the same wherever the source folder lies

    @property
    def differs(self) -> bool:
        return all(not count.agrees(self.images, self.classes) for count in self.split.published or [Count()])


@dataclass(frozen=True)
class Converted:
    """A split after conversion to shards."""

    listed: Listed
    images: int
    classes: int
    damaged: tuple[Skipped, ...]  # images that were left out
    kept: bool  # from an earlier call


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
    """Pack each split of a data set into output/SPLIT; keep a split packed earlier from the same list.

    Also write dataset.json (what was converted), missing.txt (split, tab and path of each listed image that is not
    there) and the JSON records of the splits. The last four arguments are those of `pack`.

    Args:
        source: folder of the files as the authors distribute them.
        only: names of splits; without any, all that are not on request.
        strict: missing images are an error.
    """
    guide = "docs/guides/data-sets.md says which files are needed and where they have to lie"
    remedy = f"{dataset.title} is offered at {dataset.site}; {guide}"
    if not source.is_dir():
        raise DistapError(f"{source}: no such folder; {remedy}")
    if output.resolve() == source.resolve():
        raise DistapError(f"{output}: the output must be another folder than the source")
    known = [split.name for split in dataset.splits]
    for name in only:
        if name not in known:
            raise DistapError(f"{dataset.title} has no split {name!r}; expected some of {', '.join(known)}")
    listed, records = [], {}
    try:
        for split in dataset.splits:
            if split.name in only if only else not split.on_request:
                file = find_list(source, split.file, dataset.folders)
                listed.append(_look(split, source, file, track))
                if split.record:
                    records[split.record[0]] = split.record[1](file)
    except MissingListError as error:
        raise DistapError(f"{error}; {remedy}") from error
    output.mkdir(parents=True, exist_ok=True)
    _write_missing(output / MISSING_FILE, listed)
    for part in listed:
        if part.missing and (strict or not part.present):
            problem = f"{len(part.missing):,} of its {part.images:,} images are missing"
            names = f"the first: {', '.join(part.missing[:SHOWN])}; {output / MISSING_FILE} names all"
            raise DistapError(f"{part.split.name}: {problem}; {names}")
        if not part.images:
            raise DistapError(f"{part.split.name}: its list names no image")
    done = _read_record(output / RECORD_FILE, dataset)
    converted = []
    layout = {"images_per_shard": images_per_shard, "shuffle": shuffle}
    for part in listed:
        converted.append(_pack(part, output / part.split.name, done["splits"], layout, workers, track))
        write_whole(output / RECORD_FILE, json.dumps(done, indent=2) + "\n")
    for name, contents in records.items():
        write_whole(output / name, json.dumps(contents, indent=1) + "\n")
    return converted


def _look(split: Split, source: Path, file: Path, track: Track) -> Listed:
    """Read the list of a split and look for its images on disk."""
    lines = 0
    images: dict[Path, ImageFile] = {}
    for image in split.images(source, file):
        lines += 1
        images.setdefault(image.path, image)  # an image that is packed twice would be its own positive
    there = ask_files(os.path.isfile, images, f"{split.name}: looking for images", track)
    present = tuple(compress(images.values(), there))
    missing = tuple(str(path.relative_to(source)) for path in compress(images, map(not_, there)))
    digest = hashlib.sha256()
    for path, class_name, group in present:
        digest.update(json.dumps([str(path.relative_to(source)), class_name, group]).encode())
    classes = len({image.class_name for image in images.values()})
    return Listed(split, len(images), classes, lines - len(images), present, missing, digest.hexdigest())


def _pack(
    part: Listed, folder: Path, done: dict[str, Any], layout: dict[str, Any], workers: int, track: Track
) -> Converted:
    """Pack a split and add it to `done`, unless it is packed already."""
    stamp = {"digest": part.digest, **layout}
    kept = folder.is_dir() and any(folder.iterdir())
    if kept and any(done.get(folder.name, {}).get(key) != value for key, value in stamp.items()):
        problem = "there is something already, and not from these images"
        raise DistapError(f"{folder}: {problem}; choose another output, or remove it")

    def named(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
        return track(items, f"{folder.name}: {description}", total)

    if not kept:
        index, skipped = pack(part.present, folder, track=named, workers=workers, **layout)
        done[folder.name] = {
            **stamp,
            "fingerprint": index.fingerprint,
            "images": len(index),
            "classes": len(index.class_name),
            "listed": {"images": part.images, "classes": part.classes},
            "missing": len(part.missing),
            "damaged": [image._asdict() for image in skipped],
        }
    own = done[folder.name]
    damaged = tuple(Skipped(**image) for image in own["damaged"])
    return Converted(part, own["images"], own["classes"], damaged, kept)


def _read_record(path: Path, dataset: Dataset) -> dict[str, Any]:
    if not path.exists():
        return {"dataset": dataset.title, "site": dataset.site, "splits": {}}
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        title, _ = record["dataset"], dict(record["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistapError(f"{path}: cannot be read: {error}; choose another output, or remove it") from error
    if title != dataset.title:
        raise DistapError(f"{path.parent}: {title} is there already; choose another output")
    return record


def _write_missing(path: Path, listed: Sequence[Listed]) -> None:
    before = path.read_text().splitlines() if path.exists() else []
    anew = {part.split.name for part in listed}
    lines = [line for line in before if line.partition("\t")[0] not in anew]
    lines += [f"{part.split.name}\t{name}" for part in listed for name in part.missing]
    write_whole(path, "".join(f"{line}\n" for line in lines))
