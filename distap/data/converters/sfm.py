"""retrieval-SfM-120k (Radenović et al. 2019): a class is a 3D model; pairs of matching images are kept beside."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distap.data.converters.dataset import Count, Dataset, Record, Split
from distap.data.converters.lists import list_file
from distap.data.converters.pickles import integers, load_plain, member, names
from distap.data.shards.sources import ImageFile
from distap.errors import DistapError

LISTS = {
    "train": "retrieval-SfM-120k.pkl",
    "val": "retrieval-SfM-120k.pkl",
    "whiten": "retrieval-SfM-120k-whiten.pkl",
}


def _images(part: str) -> Callable[[Path], Iterator[ImageFile]]:
    def images(source: Path) -> Iterator[ImageFile]:
        file, lists = _lists(source, part)
        identifiers = _identifiers(file, lists)
        if part == "whiten":  # no 3D models there: whitening learns from pairs alone
            models = identifiers
        else:
            models = [str(model) for model in integers(file, member(file, lists, "cluster", part), "cluster")]
        if len(models) != len(identifiers):
            raise DistapError(f"{file}: {part} has {len(identifiers)} images, but clusters of {len(models)}")
        for identifier, model in zip(identifiers, models, strict=True):
            pairs = identifier[-2:], identifier[-4:-2], identifier[-6:-4]
            yield ImageFile(source.joinpath("ims", *pairs, identifier), model)

    return images


def _pairs(part: str) -> Callable[[Path], Any]:
    def pairs(source: Path) -> Any:
        file, lists = _lists(source, part)
        identifiers = _identifiers(file, lists)
        sides = [
            integers(file, member(file, lists, key, part), key, below=len(identifiers)) for key in ("qidxs", "pidxs")
        ]
        if len(sides[0]) != len(sides[1]):
            raise DistapError(f"{file}: {part} has {len(sides[0])} queries, but {len(sides[1])} positives")
        return [
            {"query": identifiers[query], "positive": identifiers[other]} for query, other in zip(*sides, strict=True)
        ]

    return pairs


def _lists(source: Path, part: str) -> tuple[Path, Any]:
    file = list_file(source, LISTS[part])
    contents = load_plain(file)
    return file, contents if part == "whiten" else member(file, contents, part)


def _identifiers(file: Path, lists: Any) -> list[str]:
    identifiers = names(file, member(file, lists, "cids"), "cids")
    for place, identifier in enumerate(identifiers):
        # Its last six letters are folders, so it must be nothing but letters and digits.
        if len(identifier) < 6 or not (identifier.isascii() and identifier.isalnum()):
            raise DistapError(
                f"{file}: cids[{place}] is {identifier[:60]!r}, expected six or more letters and digits"
            )
    return identifiers


DATASET = Dataset(
    "retrieval-SfM-120k",
    "http://cmp.felk.cvut.cz/cnnimageretrieval",
    (
        Split("train", _images("train"), (Count(91_642, 551),), record=Record("train_pairs.json", _pairs("train"))),
        Split(
            "validation", _images("val"), (Count(6_403, 162),), record=Record("validation_pairs.json", _pairs("val"))
        ),
        Split("whiten", _images("whiten"), on_request=True, record=Record("whiten_pairs.json", _pairs("whiten"))),
    ),
)
