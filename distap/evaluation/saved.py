"""Save an evaluation to a folder, and read its figures and hits back without network or images."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field

from distap.config.evaluation_sections import MERGED
from distap.data.joined import JoinedImages
from distap.errors import DistapError
from distap.evaluation.query_values import QueryValues
from distap.retrieval.descriptor_files import reading
from distap.storage.atomic import write_whole
from distap.storage.columns import columns_file
from distap.storage.texts import read_json

if TYPE_CHECKING:  # a page about a run is written without torch
    from distap.retrieval.evaluate import Evaluated

FOLDER = "evaluations"
RESULT_FILE = "result.json"
RETRIEVED_FILE = "retrieved.npz"
QUERIES_FILE = "queries.npz"
SET_FOLDER = "set-"  # and the name of a further data set, within the folder of the first
# the protocols of which neighbours are kept
LABELLED = "labelled set"
QUERIED = "queries and another gallery"
DRAWN = "queries and a gallery that is drawn"


def _without_null(figures: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}


Figures = Annotated[dict[str, float], BeforeValidator(_without_null)]


@dataclass(frozen=True)
class Retrieved:
    """Hits of Q queries among N images. Rows are numbered 0 to N-1.

    A separate gallery's rows follow the queries'.
    """

    # (N,) number in the data set's index, ascending; another gallery is numbered after it
    sample: NDArray[np.int64]
    key: NDArray[np.str_]  # (N,)
    class_name: NDArray[np.str_]  # (N,) "" for none
    average_precision: NDArray[np.float64]  # (Q,) NaN without a positive
    first_positive: NDArray[np.int64]  # (Q,) rank from 1, 0 without a positive
    neighbours: NDArray[np.int64]  # (Q, k) rows, best first

    @classmethod
    def of(
        cls, images: JoinedImages, samples: NDArray[np.int64], evaluated: "Evaluated"
    ) -> "Retrieved":
        """Take the hits of queries, which are the first of `samples`; a gallery follows them."""
        queries = len(evaluated.first_positive)
        first = queries if len(samples) > queries else 0
        return cls(
            samples,
            images.keys[samples],
            images.classes[samples],
            evaluated.values["mAP"].cpu().numpy(),
            evaluated.first_positive.cpu().numpy(),
            (evaluated.neighbours + first).cpu().numpy(),
        )


class Evaluation(BaseModel, extra="allow", arbitrary_types_allowed=True):
    """The figures and hits of a network on a data set, with one refinement of its descriptors."""

    folder: Path | None = Field(default=None, exclude=True)  # that it was read from
    # of LABELLED and QUERIED, until it is saved
    hits: Retrieved | None = Field(default=None, exclude=True)
    by_query: QueryValues | None = Field(default=None, exclude=True)  # until it is saved
    step: int | None = None  # of a training
    set: str | None = None  # its name there
    data: str
    gallery: str | None = None  # that is not of `data`
    protocol: str = LABELLED
    refinement: str = "plain"
    fingerprint: str
    images: int
    queries: int  # that have a positive
    left_out: int = 0  # queries without a positive, in the group with most
    figures: Figures  # means over the queries, from 0 to 1

    def save(self, folder: Path, **about: Any) -> None:
        """Write the evaluation to a folder, with `about` in result.json.

        The folder holds no evaluation until all is written; an earlier one is replaced.
        """
        path = folder / RESULT_FILE
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DistapError(
                "storage.not_written", f"{path}: cannot be replaced: {error.strerror or error}"
            ) from error
        if self.hits is not None:
            write_whole(folder / RETRIEVED_FILE, columns_file(**vars(self.hits)))
        if self.by_query is not None:
            write_whole(folder / QUERIES_FILE, columns_file(**vars(self.by_query)))
        write_whole(path, self.model_copy(update=about).model_dump_json(indent=1) + "\n")

    def retrieved(self) -> Retrieved | None:
        """Read the hits of each image; return None for a protocol that keeps none."""
        if self.protocol not in (LABELLED, QUERIED) or self.folder is None:
            return self.hits
        path = self.folder / RETRIEVED_FILE
        with reading(path, "distap eval"):
            return Retrieved(**np.load(BytesIO(path.read_bytes()), allow_pickle=False))

    def query_values(self) -> QueryValues:
        """Read the figures of each query."""
        if self.by_query is not None:
            return self.by_query
        path = (self.folder or Path()) / QUERIES_FILE
        with reading(path, "distap eval --output"):
            return QueryValues(**np.load(BytesIO(path.read_bytes()), allow_pickle=False))


def read_evaluation(folder: Path) -> Evaluation:
    """Read the evaluation in a folder, or raise a DistapError."""
    path = folder / RESULT_FILE
    with reading(path, "distap eval"):
        return Evaluation.model_validate({**read_json(path), "folder": folder})


def save_evaluations(folder: Path, evaluations: Mapping[str, Evaluation], **about: Any) -> None:
    """Write the evaluations of several data sets: the first to `folder`, each other one below it.

    The first is written last, so that a folder with one holds all.
    """
    first, *others = evaluations
    for name in (*others, first):
        place = folder if name == first else folder / f"{SET_FOLDER}{quote(name, safe='')}"
        evaluations[name].save(place, set=name, **about)


def read_evaluations(folder: Path) -> dict[str, Evaluation]:
    """Read what `save_evaluations` wrote, by data set, or raise a DistapError."""
    places = [folder, *sorted(folder.glob(f"{SET_FOLDER}*"))]
    evaluations = [read_evaluation(place) for place in places]
    by_set = {evaluation.set or evaluation.data: evaluation for evaluation in evaluations}
    return dict(sorted(by_set.items(), key=lambda item: item[0] == MERGED))


def folder_of_step(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Return the steps whose evaluations a training kept, ascending."""
    names = [path.parent.name for path in (run / FOLDER).glob(f"step-*/{RESULT_FILE}")]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())
