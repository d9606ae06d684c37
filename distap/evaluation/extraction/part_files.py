"""The parts of an extraction on disk, and the plan that says what they belong to.

OUTPUT/extraction.json   what is described by what; written first
OUTPUT/parts/000012.npz  a part, written whole by the rank that described it; gone when all are put together
"""

import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.evaluation.extraction.parts import DescribedPart
from distap.storage.atomic import write_whole

PLAN_FILE, PARTS_FOLDER = "extraction.json", "parts"
FIGURES = "written"  # key of the plan, of what came of it
PLAN_VERSION = 1
NAME = re.compile(r"(\d{6,})\.npz")
LISTING_SECONDS = 60.0  # for which a network file system may go on showing what a folder held before
POLL_SECONDS = 0.5
REMEDY = "give what it was begun with, remove the folder, or choose another one"


@dataclass(frozen=True)
class PartFiles:
    """The parts of one extraction.

    Args:
        output: the folder of the extraction.
    """

    output: Path

    @property
    def folder(self) -> Path:
        """Of the parts."""
        return self.output / PARTS_FOLDER

    def write(self, number: int, part: DescribedPart, dtype: str) -> None:
        """Write a part whole; raises an UnwritableError where that fails."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            samples=part.samples,
            descriptors=part.descriptors.astype(dtype, copy=False),
            left_out=np.array(list(part.left_out), dtype=np.int64),
            reasons=np.array(list(part.left_out.values()), dtype=np.str_),
            batches=np.array(part.batches),
        )
        write_whole(self.path(number), buffer.getvalue())

    def path(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"{number:06d}.npz"

    def written(self) -> set[int]:
        """Numbers of the parts that are there."""
        names = (path.name for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        return {int(match[1]) for match in map(NAME.fullmatch, names) if match}

    def about(self, number: int) -> tuple[NDArray[np.int64], dict[int, str], int]:
        """A part's samples, those left out with the reasons, and its batches; descriptors are not read."""
        with self._opened(number) as file:
            left_out = dict(zip(file["left_out"].tolist(), file["reasons"].tolist(), strict=True))
            return file["samples"], left_out, int(file["batches"])

    def descriptors(self, number: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """A part's samples and their descriptors."""
        with self._opened(number) as file:
            return file["samples"], file["descriptors"]

    def remove(self) -> None:
        """Remove all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _opened(self, number: int) -> Iterator[Any]:
        path = self.path(number)
        deadline = time.monotonic() + LISTING_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # another host has written it
        try:
            with np.load(path, allow_pickle=False) as file:
                yield file
        except FileNotFoundError as error:
            raise DistapError(
                f"{path}: another rank has written it, but it cannot be seen here: all hosts need the same folder"
            ) from error
        except Exception as error:  # zipfile and numpy raise what their parts raise
            path.unlink(missing_ok=True)
            raise DistapError(
                f"{path}: damaged on the disk ({error}), and removed; the same command describes this part again"
            ) from error


def begin(output: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The plan of what is in a folder already, which has to be this one, or this one, which is then written.

    Args:
        output: the folder.
        plan: what is to be described by what; `part_images` of one that was begun holds instead of this one's.
    Raises:
        DistapError: something else is in the folder.
    """
    path = output / PLAN_FILE
    plan = {"version": PLAN_VERSION, **plan}
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        write_whole(path, json.dumps(plan, indent=2) + "\n")
        return plan
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        part_images = int(earlier["part_images"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DistapError(
            f"{output}: there is something already that is no extraction; choose another folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistapError(f"{path}: not readable as the plan of an extraction: {error!r}; {REMEDY}") from error
    if part_images < 1:
        raise DistapError(f"{path}: part_images is {part_images}; {REMEDY}")
    before = _flat(earlier)
    differences = [
        f"{name} was {before.get(name)!r} and is {value!r}"
        for name, value in _flat(plan).items()
        if name != "part_images" and before.get(name) != value
    ]
    if differences:
        raise DistapError(
            f"{output}: an extraction of something else was begun there: {'; '.join(differences)}; {REMEDY}"
        )
    return {**plan, "part_images": part_images}


def finish(output: Path, figures: dict[str, int]) -> None:
    """Write beside the plan what came of it."""
    path = output / PLAN_FILE
    plan = json.loads(path.read_text(encoding="utf-8"))
    write_whole(path, json.dumps({**plan, FIGURES: figures}, indent=2) + "\n")


def figures_of(output: Path) -> dict[str, int]:
    """What `finish` wrote.

    Raises:
        DistapError: it did not, or that cannot be read.
    """
    path = output / PLAN_FILE
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))[FIGURES]
        return {name: int(value) for name, value in figures.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DistapError(f"{path}: not readable: {error!r}; remove {output} and extract again") from error


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, without levels."""
    levels = json.loads(json.dumps(plan))
    inner = levels.pop("described_by", None)
    return {**levels, **(inner if isinstance(inner, dict) else {"described_by": inner})}
