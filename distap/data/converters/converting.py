"""Convert a published data set: read its lists, look for the listed images, and pack its splits into shards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.data.converters import faces, landmarks, metric_learning, protocols, revisited
from distap.data.converters.dataset import GROUND_TRUTH_FILE, Count, Dataset, Split, find_list
from distap.data.shards.image_files import ImageFile, Listing
from distap.data.shards.image_folders import Skipped
from distap.data.shards.index import Index
from distap.data.shards.packing import pack_parts, require_free
from distap.data.shards.parallel import Track, untracked
from distap.errors import DistapError

DATASETS: dict[str, Dataset] = {
    "sop": metric_learning.STANFORD_ONLINE_PRODUCTS,
    "cub": metric_learning.CUB,
    "cars-196": metric_learning.CARS,
    "inaturalist": metric_learning.INATURALIST,
    "vehicleid": metric_learning.VEHICLE_ID,
    "inshop": metric_learning.IN_SHOP,
    **metric_learning.DYML,
    "landmarks-clean": landmarks.LANDMARKS_CLEAN,
    "sfm-120k": revisited.SFM_120K,
    "gldv2": landmarks.GOOGLE_LANDMARKS,
    "h-gldv2": landmarks.HIERARCHICAL_LANDMARKS,
    "roxford5k": revisited.OXFORD,
    "rparis6k": revisited.PARIS,
    "revisitop1m": revisited.DISTRACTORS,
    "ilias": protocols.ILIAS,
    "market-1501": protocols.MARKET,
    "msmt17": protocols.MSMT17,
    "veri-776": protocols.VERI,
    "places": protocols.PLACE_RECOGNITION,
    "uned": protocols.UNED,
    "vggface2": faces.VGG_FACE2,
    "ijb-c": faces.IJB_C,
}


@dataclass(frozen=True)
class Converted:
    """A split after conversion to shards."""

    split: Split
    images: int  # in its list, each counted once
    classes: int
    index: Index
    left_out: list[Skipped]  # listed images that are not there, are damaged, or are listed again

    @property
    def differs(self) -> bool:
        return all(not count.agrees(self.images, self.classes) for count in self.split.published or [Count()])


def convert(
    dataset: Dataset, source: Path, output: Path, *, only: Sequence[str] = (), track: Track = untracked, **layout: Any
) -> list[Converted]:
    """Convert the splits of a data set into shards in output/SPLIT, with a JSON file for some of the splits.

    Args:
        source: folder of the files as the authors distribute them.
        output: folder that must not exist, or be empty, and appears when everything is in it.
        only: names of the splits to convert; by default all.
        layout: see `pack_parts`.
    """
    guide = "docs/guides/data-sets.md says which files are needed and where they have to lie"
    remedy = f"{dataset.title} is offered at {dataset.site}; {guide}"
    if not source.is_dir():
        raise DistapError(f"{source}: no such folder; {remedy}")
    known = [split.name for split in dataset.splits]
    for name in only:
        if name not in known:
            raise DistapError(f"{dataset.title} has no split {name!r}; expected some of {', '.join(known)}")
    require_free(output)
    chosen = [split for split in dataset.splits if split.name in (only or known)]
    listed, counts, truths = dict[str, Listing](), list[Count](), dict[str, str]()
    try:
        for split in chosen:
            file = find_list(source, split.file, dataset.folders)
            listed[split.name], count = _listing(split, source, file)
            counts.append(count)
            if split.truth:
                truths[GROUND_TRUTH_FILE] = json.dumps(split.truth(file), indent=1) + "\n"
    except DistapError as error:
        raise DistapError(f"{error}; {remedy}") from error
    for name, listing in listed.items():
        if not listing.images:
            raise DistapError(f"{name}: its list names no image")
    packed = pack_parts(listed, output, track=track, files=truths, **layout)
    return [
        Converted(split, count.images or 0, count.classes or 0, index, left_out)
        for split, count, (index, left_out) in zip(chosen, counts, packed, strict=True)
    ]


def _listing(split: Split, source: Path, file: Path) -> tuple[Listing, Count]:
    """Return the images of a split's list, and how many it has."""
    images, left_out = dict[tuple[Path, Any], ImageFile](), list[Skipped]()
    for image in split.images(source, file):
        place = image.path, image.box
        if images.setdefault(place, image) is not image:  # packed twice, it would be its own positive
            left_out.append(Skipped(str(image.path.relative_to(source)), "images that are listed again"))
    count = Count(len(images), len({image.class_name for image in images.values()}))
    return Listing(list(images.values()), left_out, source), count
