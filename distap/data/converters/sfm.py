"""retrieval-SfM-120k (Radenović et al. 2019): a class is a 3D model, and JSON files list pairs of matching images."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from distap.data.converters.dataset import Count, Dataset, Split
from distap.data.converters.pickles import PlainValue, read_plain_pickle
from distap.data.shards.image_files import ImageFile


def _images(source: Path, file: Path, part: str) -> Iterator[ImageFile]:
    lists = _lists(file, part)
    identifiers = _identifiers(lists)
    # Whitening learns from pairs alone, so its list has no 3D models.
    models = identifiers if part == "whiten" else [str(model) for model in lists["cluster"].integers()]
    if len(models) != len(identifiers):
        raise lists.wrong(f"has {len(identifiers)} images, but clusters of {len(models)}")
    for identifier, model in zip(identifiers, models, strict=True):
        folders = identifier[-2:], identifier[-4:-2], identifier[-6:-4]
        yield ImageFile(source.joinpath("ims", *folders, identifier), model)


def _pairs(file: Path, part: str) -> list[dict[str, str]]:
    lists = _lists(file, part)
    identifiers = _identifiers(lists)
    queries, positives = (lists[key].integers(len(identifiers)) for key in ("qidxs", "pidxs"))
    if len(queries) != len(positives):
        raise lists.wrong(f"has {len(queries)} queries, but {len(positives)} positives")
    pairs = zip(queries, positives, strict=True)
    return [{"query": identifiers[query], "positive": identifiers[positive]} for query, positive in pairs]


def _lists(file: Path, part: str) -> PlainValue:
    contents = read_plain_pickle(file)
    return contents if part == "whiten" else contents[part]


def _identifiers(lists: PlainValue) -> list[str]:
    identifiers = lists["cids"].names()
    for place, identifier in enumerate(identifiers):
        # Its last six letters are folders, so it must hold nothing but letters and digits.
        if len(identifier) < 6 or not (identifier.isascii() and identifier.isalnum()):
            raise (
                lists["cids"].items()[place].wrong(f"is {identifier[:60]!r}, expected six or more letters and digits")
            )
    return identifiers


def _split(name: str, part: str, file: str, *published: Count) -> Split:
    record = f"{name}_pairs.json", partial(_pairs, part=part)
    return Split(name, (file,), partial(_images, part=part), published, part == "whiten", record)


DATASET = Dataset(
    "retrieval-SfM-120k",
    "http://cmp.felk.cvut.cz/cnnimageretrieval",
    (
        _split("train", "train", "retrieval-SfM-120k.pkl", Count(91_642, 551)),
        _split("validation", "val", "retrieval-SfM-120k.pkl", Count(6_403, 162)),
        _split("whiten", "whiten", "retrieval-SfM-120k-whiten.pkl"),
    ),
)
