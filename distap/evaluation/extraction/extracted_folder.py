"""Describe a data set into a folder that all ranks share, part by part.

A stopped extraction continues from its parts.

OUTPUT/extraction.json     the plan: what is described in which way; written first, by rank 0
OUTPUT/parts/000012.npz    a part, written by the rank that described it; removed at the end
OUTPUT/about.json ...      the descriptors of all parts, see `retrieval/descriptor_files.py`
"""

import json
import logging
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from distap.checkpoint.agreement import on_rank_0
from distap.errors import DistapError, logger
from distap.evaluation.extraction.extracting import DescribedPart, Extraction
from distap.evaluation.row_folder import RowFolder
from distap.retrieval.descriptor_files import (
    ABOUT_FILE,
    DESCRIPTORS_FILE,
    EXTRACTION_FILE,
    DescriptorSet,
    read_descriptors,
    reading,
    write_described,
)
from distap.retrieval.joining import joined_rows
from distap.retrieval.row_blocks import row_blocks
from distap.retrieval.truth import NONE
from distap.storage.atomic import file_identity, write_whole
from distap.storage.columns import columns_file
from distap.storage.texts import read_json

PARTS_FOLDER = "parts"
EXTRACTION_VERSION = 3


def extract_to_folder(
    extraction: Extraction, output: Path, earlier: RowFolder | None = None
) -> DescriptorSet:
    """Describe every image of a data set into a folder that `read_descriptors` reads.

    Each rank writes the parts that it describes, and rank 0 joins them. Called again with the same
    images and describer, a stopped extraction continues from its finished parts, on any number of
    ranks.

    Args:
        output: a new or empty folder that all ranks see, or that of a stopped extraction.
        earlier: descriptors to take over, whose rows come first; only images without a row there
            are described. If another network made them, the folder says which row is of which.
    Returns:
        The descriptors, on every rank.
    Raises:
        DistapError: earlier descriptors have other dimensions, names in another form, or the same
            network with other settings.
    """
    if earlier is not None:
        extraction = _of_missing(extraction, earlier)
    describer = extraction.describing.describer
    world = extraction.describing.world
    images = extraction.images
    plan = {
        "version": EXTRACTION_VERSION,
        "fingerprint": images.index.fingerprint,
        "images": len(extraction.samples),
        **asdict(describer.described_by),
        "precision": describer.precision,
        "part_images": extraction.part_size,
    }
    if earlier is not None:
        plan["earlier"] = asdict(file_identity(earlier.folder / ABOUT_FILE))
    parts = extraction.parts

    def begin() -> list[Any]:
        _begin(output, plan)
        with suppress(DistapError):
            read_descriptors(output)
            shutil.rmtree(output / PARTS_FOLDER, ignore_errors=True)
            return [[], True]
        return [
            [number for number in range(len(parts)) if not _part_path(output, number).exists()],
            False,
        ]

    missing, is_complete = on_rank_0(world, begin)
    _require_shared(output, extraction)
    total = len(extraction.samples)
    before = total - sum(len(parts[number]) for number in missing)
    if before and world.rank == 0:
        logger.info("%s: %d of %d images are described already", output, before, total)
    for number, part in extraction.described(missing):
        write_whole(_part_path(output, number), part_file(part))
    if not is_complete:
        on_rank_0(world, lambda: _join_parts(extraction, output, len(parts), earlier))
    return read_descriptors(output)


def _of_missing(extraction: Extraction, earlier: RowFolder) -> Extraction:
    """Return the extraction of the images that have no earlier descriptor."""
    describer = extraction.describing.describer
    earlier.require_dimensions(describer.dimensions)
    described_by = describer.described_by
    for made in earlier.stored.makers:
        is_alike = replace(made, sizing=described_by.sizing) == described_by
        if made.network == described_by.network and not is_alike:
            raise DistapError(
                "descriptors.other_settings",
                f"{earlier.folder}: this network has described images there in another way: {made},"
                f" and now {described_by}: give the whitening, scales, antialias and dimensions of"
                " then",
            )
    images = extraction.images
    rows = earlier.rows_of(images.keys)
    missing = np.flatnonzero(rows == NONE)
    earlier.refuse_other_form(images.keys[missing])
    if extraction.describing.world.rank == 0:
        _report_joined(extraction, earlier, rows)
    return replace(extraction, only=missing)


def _report_joined(extraction: Extraction, earlier: RowFolder, rows: NDArray[np.int64]) -> None:
    """Log how many images have earlier rows, and warn if these may be of other images."""
    images = extraction.images
    sizing = extraction.describing.describer.described_by.sizing
    for other in {made.sizing for made in earlier.stored.makers} - {sizing}:
        logger.warning(
            "%s: its images were described at `%s`, and the others are at `%s`",
            earlier.folder,
            other,
            sizing,
        )
    joined = np.flatnonzero(rows != NONE)
    missing = len(rows) - len(joined)
    logger.log(
        logging.INFO if missing else logging.WARNING,
        "%d of %d images of %s have rows in %s already; %d are described",
        len(joined),
        len(rows),
        images.name,
        earlier.folder,
        missing,
    )
    before = earlier.stored.classes[rows[joined]]
    now = images.classes[joined]
    differing = np.flatnonzero((before != now) & (before != "") & (now != ""))
    if len(differing):
        first = differing[0]
        logger.warning(
            "%d of these images have another class in %s, such as %s: %s there, and %s here: if"
            " they are other images of the same names, rename them",
            len(differing),
            earlier.folder,
            images.keys[joined[first]],
            before[first],
            now[first],
        )


def part_file(part: DescribedPart) -> bytes:
    return columns_file(
        descriptors=part.descriptors,
        left_out=np.array(list(part.left_out), dtype=np.int64),
        reasons=np.array(list(part.left_out.values()), dtype=np.str_),
    )


def _part_path(output: Path, number: int) -> Path:
    return output / PARTS_FOLDER / f"{number:06d}.npz"


def _read_part(output: Path, number: int, *names: str) -> list[Any]:
    """Read the arrays of a part; raise a DistapError that names its file."""
    path = _part_path(output, number)
    try:
        with reading(path, "distap extract"), np.load(path, allow_pickle=False) as file:
            return [file[name] for name in names]
    except DistapError as error:
        raise DistapError(
            error.code, f"{error}; remove it, and the same command describes this part again"
        ) from error


def _begin(output: Path, plan: dict[str, Any]) -> None:
    """Write the plan into a new or empty folder, or require the same plan there."""
    path = output / EXTRACTION_FILE
    # Through JSON, like the earlier plan: a tuple would not equal the list that it becomes there.
    plan = json.loads(json.dumps(plan))
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        write_whole(path, json.dumps(plan, indent=2) + "\n")
        return
    if not path.exists():
        raise DistapError(
            "descriptors.folder_in_use",
            f"{output}: holds something that is no extraction; choose another folder",
        )
    with reading(path, "distap extract"):
        earlier = read_json(path)
    changes = [
        f"{name} was {earlier.get(name)!r} and is {plan.get(name)!r}"
        for name in {**earlier, **plan}
        if earlier.get(name) != plan.get(name)
    ]
    if changes:
        raise DistapError(
            "descriptors.folder_in_use",
            f"{output}: an extraction of something else was begun there: {'; '.join(changes)}; give"
            " what it was begun with, or choose another folder",
        )


def _require_shared(output: Path, extraction: Extraction) -> None:
    """Raise a DistapError on all ranks if a rank does not see the plan that rank 0 wrote."""
    try:
        # Two hosts may each have a folder of this name; number and time of the file tell them
        # apart.
        status = (output / EXTRACTION_FILE).stat()
        seen = [status.st_ino, status.st_size, status.st_mtime_ns]
    except OSError:
        seen = []
    statuses = extraction.describing.world.gather_values(seen)
    apart = [rank for rank, status in enumerate(statuses) if status != statuses[0]]
    if apart:
        raise DistapError(
            "ranks.no_shared_folder",
            f"{output}: rank {apart[0]} does not see rank 0's folder; name one that all hosts"
            " share",
        )


def _join_parts(
    extraction: Extraction, output: Path, parts: int, earlier: RowFolder | None
) -> None:
    """Join the arrays of all parts, which are in the order of the data set, without holding them
    in memory.
    """
    describer = extraction.describing.describer
    images = extraction.images
    left_out: dict[int, str] = {}
    for number in range(parts):
        samples, texts = _read_part(output, number, "left_out", "reasons")
        left_out.update(zip(samples.tolist(), texts.tolist(), strict=True))
    if len(left_out) == len(images):
        shutil.rmtree(output / PARTS_FOLDER, ignore_errors=True)
        raise DistapError(
            "data.none_described",
            f"{images.name}: none of its {len(images)} images can be described; first:"
            f" {min(left_out.items())[1]}",
        )
    present = np.setdiff1d(extraction.samples, [*left_out]).astype(np.int64)
    reasons = {str(images.keys[sample]): reason for sample, reason in sorted(left_out.items())}
    described = DescriptorSet(
        # The record takes shape and type alone from the array, which the parts fill in the file.
        np.broadcast_to(np.zeros(1, np.float32), (len(present), describer.dimensions)),
        images.keys[present],
        images.classes[present],
        describer.described_by,
        images.name,
        reasons | dict(images.index.left_out),
        columns={name: texts[present] for name, texts in images.index.further.items()},
        checksums=images.checksums(present.tolist()),
    )
    if earlier is not None:
        described = joined_rows(earlier.stored, described)

    def write(file: BinaryIO) -> None:
        header = {"descr": np.dtype(np.float32).str, "fortran_order": False}
        header["shape"] = described.descriptors.shape
        np.lib.format.write_array_header_1_0(file, header)
        for _, block in () if earlier is None else row_blocks(earlier.stored.descriptors):
            file.write(block.tobytes())
        for number in range(parts):
            file.write(_read_part(output, number, "descriptors")[0].tobytes())

    write_described(output, described, {DESCRIPTORS_FILE: write}, precision=describer.precision)
    shutil.rmtree(output / PARTS_FOLDER, ignore_errors=True)
