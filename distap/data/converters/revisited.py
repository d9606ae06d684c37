"""Converters of Radenović et al.: revisited Oxford and Paris, distractors, and SfM-120k.

A query or gallery image is a class of its own, called by its name, because the ground truth names
easy, hard and junk images one by one. Distractors are one class that no ground truth names.

Their lists are pickles, which are read without running code: containers, numbers, texts and numpy
arrays only. Each numpy name in such a pickle is replaced by a stand-in below, which keeps data and
does nothing else.
"""

import math
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distap.data.converters.dataset import (
    DATASETS,
    Count,
    Dataset,
    Images,
    Split,
    Truth,
    ground_truth,
    read_table,
)
from distap.data.images.formats import FORMAT_BY_SUFFIX
from distap.data.shards.image_files import ImageFile
from distap.data.shards.tables import ListLine
from distap.errors import DistapError

OF_REVISITED = ["mAP/trapezoids", "mP@1/last", "mP@5/last", "mP@10/last"]
# grades of easy and hard images; the other is junk
DIFFICULTIES = {"Easy": [1], "Medium": [1, 2], "Hard": [2]}

PLAIN_TYPE = re.compile(r"[?biuf]\d{1,2}|\?|[SUO]\d{0,9}")


def _images(source: Path, file: Path, key: str) -> Images:
    for place, name in enumerate(plain_value(file)[key], 1):
        # Errors name the place in the pickle as a line of a list.
        yield ImageFile(
            ListLine(file, place, [name]).path(source / "jpg", _with_suffix(name)), name
        )


def _ground_truth(file: Path, dataset: str) -> Truth:
    contents = plain_value(file)
    queries = []
    for query, truth in zip(contents["qimlist"], contents["gnd"], strict=True):
        easy, hard, junk = (
            [contents["imlist"][place] for place in truth[kind]]
            for kind in ("easy", "hard", "junk")
        )
        queries.append(
            {
                "name": query,
                "box": truth["bbx"],
                "positives": easy + hard,
                "grades": [1] * len(easy) + [2] * len(hard),
                "junk": junk,
            }
        )
    return ground_truth(dataset, OF_REVISITED, queries, groups=DIFFICULTIES)


def _distractors(source: Path, file: Path) -> Images:
    for line in read_table(file, ("path",), heading=0):
        name = _with_suffix(line[0].removeprefix("jpg/"))
        yield ImageFile(line.path(source / "jpg", name), "distractor")


def _with_suffix(name: str) -> str:
    return name if Path(name).suffix.lower() in FORMAT_BY_SUFFIX else f"{name}.jpg"


def _revisited(dataset: str, gallery: int) -> Dataset:
    file = f"gnd_{dataset}.pkl"
    truth = partial(_ground_truth, dataset=dataset)
    queries = Split("query", file, partial(_images, key="qimlist"), (Count(70, 70),), truth=truth)
    images = Split("gallery", file, partial(_images, key="imlist"), (Count(gallery, gallery),))
    return Dataset(queries, images)


DATASETS["roxford5k"] = _revisited("roxford5k", 4_993)
DATASETS["rparis6k"] = _revisited("rparis6k", 6_322)
DATASETS["revisitop1m"] = Dataset(
    Split("distractors", "revisitop1m.txt", _distractors, (Count(1_001_001, 1),))
)


def _sfm_images(source: Path, file: Path, half: str) -> Images:
    """Yield the images of a half, each with its 3D model as its class."""
    lists = plain_value(file)[half]
    for place, (name, model) in enumerate(zip(lists["cids"], lists["cluster"], strict=True), 1):
        # The last six letters of a name are folders.
        path = f"{name[-2:]}/{name[-4:-2]}/{name[-6:-4]}/{name}"
        yield ImageFile(ListLine(file, place, [name]).path(source / "ims", path), str(model))


DATASETS["sfm-120k"] = Dataset(  # Radenović et al. 2019: a class is a 3D model
    Split(
        "train", "retrieval-SfM-120k.pkl", partial(_sfm_images, half="train"), (Count(91_642, 551),)
    ),
    Split(
        "validation",
        "retrieval-SfM-120k.pkl",
        partial(_sfm_images, half="val"),
        (Count(6_403, 162),),
    ),
)


class PlainUnpickler(pickle.Unpickler):
    """Look every name up in STAND_INS; `pickle.load` would import and call whatever a pickle names.

    numpy's own classes are none of them: dtype lets a pickle set flags with which the bytes of an
    array are taken for pointers to objects, which would run what they point to.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            # Older pickles have older names of the same modules.
            return STAND_INS[
                module.replace("numpy.core", "numpy._core").replace("__builtin__", "builtins"), name
            ]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}. Nothing of it was run: get it from its authors"
            ) from None


def plain_value(path: Path) -> Any:
    """Read a pickle of plain data.

    Raises a DistapError if it is unreadable or damaged, or names other classes.
    """
    try:
        with path.open("rb") as file:
            # Python 2 wrote bytes as strings, which are read as Latin-1.
            return PlainUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle can fail in any way
        raise DistapError(
            "data.wrong_list", f"{path}: not a readable pickle of plain data: {error}"
        ) from error


class _Type:
    """Stand-in for numpy.dtype, of numbers, texts and lists only."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not PLAIN_TYPE.fullmatch(code):
            raise pickle.UnpicklingError(f"array of type {code!r:.60}")
        self.code = code
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def values(self, data: Any, shape: Any = (1,), columns_first: bool = False) -> list[Any]:
        """Return an array's values, row after row."""
        if not self.code.startswith("O"):
            raw = data.encode("latin1") if isinstance(data, str) else data
            data = np.frombuffer(raw, np.dtype(self.order + self.code)).tolist()
        if len(data) != math.prod(shape) or (columns_first and len(shape) > 1):
            raise pickle.UnpicklingError(f"array of shape {shape!r:.60} with {len(data)} values")
        return list(data)


class _Array(list[Any]):
    """Stand-in for a numpy array: a list of its values."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, data = state
        self[:] = kind.values(data, shape, columns_first)


def _encode(text: Any, encoding: Any) -> bytes:
    """Stand-in for _codecs.encode, with which protocol 2 writes bytes.

    Other codecs would run code.
    """
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding!r:.60}")
    return str(text).encode("latin1")


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # which pickles name but never call
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
    # protocol 2 writes the bytes of an empty array as such a call
    ("builtins", "bytes"): lambda: b"",
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "scalar"): lambda kind, data: kind.values(data)[0],
    ("numpy._core.numeric", "_frombuffer"): lambda data, kind, shape, order: kind.values(
        data, shape, order == "F"
    ),
}
