"""Save an evaluation to a folder, and read what it scored and retrieved without the network or the images."""

import io
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator

from distap.errors import DistapError
from distap.storage.atomic import UnwritableError, write_whole
from distap.storage.columns import read_columns

FOLDER, RESULT_FILE, NEIGHBOURS_FILE, QUERIES_FILE = "evaluations", "result.json", "neighbours.npz", "queries.npz"
LABELLED, QUERIED = "labelled set", "queries and another gallery"  # the protocols of which neighbours are kept
DRAWN = "queries and a gallery that is drawn"
NEIGHBOURS = {"sample": "int64", "neighbour": "int64"}
QUERIES = {
    **{"sample": "int64", "key": "U", "label": "int64", "first_positive": "int64", "class_name": "U"},
    **{"average_precision": "float64", "average_precision_at_r": "float64"},
}


Figures = Annotated[
    dict[str, float], BeforeValidator(lambda own: {name: own[name] for name in own if own[name] is not None})
]


@dataclass(frozen=True)
class Retrieved:
    """The hits of each of N images of K classes. Rows are numbered 0 to N-1; another gallery follows the queries."""

    sample: NDArray[np.int64]  # (N,) number in the data set's index, ascending; another gallery is numbered after it
    key: NDArray[np.str_]  # (N,)
    label: NDArray[np.int64]  # (N,) class number, -1 for none
    average_precision: NDArray[np.float64]  # (N,) NaN if the image is no query
    average_precision_at_r: NDArray[np.float64]  # (N,)
    first_positive: NDArray[np.int64]  # (N,) rank from 1, 0 if the image is no query
    class_name: NDArray[np.str_]  # (K,)
    neighbours: NDArray[np.int64]  # (N, k) rows, best first

    def class_of(self, row: int) -> str:
        """Name of a row's class, empty without one."""
        return str(self.class_name[self.label[row]]) if self.label[row] >= 0 else ""


@dataclass(frozen=True)
class Evaluation:
    """The figures and hits of a network on a data set, with one refinement of its descriptors."""

    figures: dict[str, float]  # means over the queries, from 0 to 1
    queries: int
    left_out: int  # queries without a positive, of several protocols in the one with most
    about: dict[str, Any]  # more entries for result.json
    retrieved: Retrieved | None = None  # of LABELLED and QUERIED

    def save(self, folder: Path, **about: Any) -> None:
        """Write it to a folder, with `about` in result.json, or raise an UnwritableError.

        The folder holds no evaluation until all is written; an earlier one is replaced.
        """
        path = folder / RESULT_FILE
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UnwritableError(f"{path}: cannot be replaced: {error.strerror or error}") from error
        if self.retrieved is not None:
            columns = vars(self.retrieved) | {"neighbour": self.retrieved.sample[self.retrieved.neighbours].ravel()}
            for name, of_file in ((QUERIES_FILE, QUERIES), (NEIGHBOURS_FILE, NEIGHBOURS)):
                buffer = io.BytesIO()
                np.savez_compressed(buffer, **{column: columns[column] for column in of_file})
                write_whole(folder / name, buffer.getvalue())
        about |= self.about | {
            "queries": self.queries,
            "queries_without_positive": self.left_out,
            "figures": nan_as_null(self.figures),
        }
        write_whole(path, json.dumps(about, indent=1) + "\n")


class SavedEvaluation(BaseModel):
    """Figures of an evaluation, from 0 to 1, and the folder with the rest of it."""

    folder: Path
    step: int | None = None  # of a training
    data: str
    gallery: str | None = None  # that is not of `data`
    protocol: str = LABELLED
    fingerprint: str
    images: int
    queries: int
    figures: Figures
    precision_at_recall: list[float] = []  # at recall 0, 0.01 ... 1
    classes: dict[str, Figures] = {}  # queries, mAP and so on of each class

    def retrieved(self) -> Retrieved | None:
        """Read what each image retrieved; None of a protocol of which it is not kept."""
        if self.protocol not in (LABELLED, QUERIED):
            return None
        queries: dict[str, Any] = _read(self.folder / QUERIES_FILE, lambda data: read_columns(data, QUERIES))
        nearest: dict[str, Any] = _read(self.folder / NEIGHBOURS_FILE, lambda data: read_columns(data, NEIGHBOURS))
        sample, neighbour = queries["sample"], nearest["neighbour"]
        rows = len(sample)
        if not (
            all(len(queries[name]) == rows for name in QUERIES if name != "class_name")
            and rows == self.images
            and np.array_equal(sample, nearest["sample"])
            and bool((np.diff(sample) > 0).all())
            and len(neighbour) % max(rows, 1) == 0
            and bool(np.isin(neighbour, sample).all())
            and bool(((queries["label"] >= -1) & (queries["label"] < len(queries["class_name"]))).all())
        ):
            raise DistapError(f"{self.folder}: its files are not of one evaluation; `distap eval` writes them anew")
        neighbours = np.searchsorted(sample, neighbour).reshape(rows, -1).astype(np.int64)
        return Retrieved(**queries, neighbours=neighbours)


def read_evaluation(folder: Path) -> SavedEvaluation:
    """Read the evaluation in a folder, or raise a DistapError."""
    path = folder / RESULT_FILE
    result: Any = _read(path, json.loads)
    try:
        return SavedEvaluation.model_validate({**result, "folder": folder})
    except (TypeError, ValueError) as error:
        raise DistapError(f"{path}: not the result of an evaluation: {error}; `distap eval` writes one") from error


def nan_as_null(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN by None, since JSON has no NaN."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def folder_of_step(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Steps after which a training kept an evaluation, ascending."""
    names = [path.parent.name for path in (run / FOLDER).glob(f"step-*/{RESULT_FILE}")]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def keep_few(run: Path, newest: int) -> None:
    """Remove a training's evaluations except the first, the one with the highest mAP, and that of step `newest`.

    Evaluations of later steps are removed too: the training was interrupted and went back to an earlier step.
    """
    steps = saved_steps(run)
    past = [step for step in steps if step <= newest]
    scores = {step: read_evaluation(folder_of_step(run, step)).figures.get("mAP", 0.0) for step in past}
    kept = {past[0], max(past, key=lambda step: scores[step]), past[-1]} if past else set()
    for step in set(steps) - kept:
        shutil.rmtree(folder_of_step(run, step), ignore_errors=True)


def _read(path: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DistapError(f"{path}: not readable: {error}; `distap eval --output {path.parent}` writes it") from error
