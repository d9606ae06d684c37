"""Describe a data set into a folder of rank 0, by all ranks. A stopped extraction continues from its finished parts.

OUTPUT/extraction.json     the plan: what is described in which way; written first
OUTPUT/parts/000012.npz    a part, handed over by the rank that described it; removed at the end
OUTPUT/left_out.txt        images that could not be described, and why
OUTPUT/about.json ...      the descriptors, see `retrieval/descriptor_files.py`
"""

import hashlib
import io
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from distap.errors import DistapError
from distap.evaluation.extraction.parts import DescribedPart, Extraction, Outbox
from distap.retrieval.descriptor_files import (
    DESCRIPTORS_FILE,
    DescriptorSet,
    Form,
    new_descriptors,
    read_descriptors,
    write_descriptors,
)
from distap.storage.atomic import write_whole

PLAN_FILE, PARTS_FOLDER, LEFT_OUT_FILE = "extraction.json", "parts", "left_out.txt"
PLAN_VERSION = 1
REMEDY = "give what it was begun with, remove the folder, or choose another one"

DType = Literal["float32", "float16"]
logger = logging.getLogger("distap")


def extract_to_folder(
    extraction: Extraction,
    output: Path,
    *,
    dtype: DType = "float32",
    form: Form = "npy",
    part_images: int | None = None,
) -> DescriptorSet | None:
    """Describe every image of a data set into a folder that `read_descriptors` reads.

    Each rank hands the parts that it describes over to rank 0, which joins them. Called again with the same images,
    describer and form, a stopped extraction continues from its finished parts, on any number of ranks.

    Args:
        output: a new or empty folder of rank 0's host, or that of a stopped extraction.
        dtype: of the stored descriptors.
        form: `npy` for arrays, `parquet` for one file.
        part_images: images of a part, which is described again if it is interrupted; by default a 1024th of all,
            from 128 to 4096.
    Returns:
        The descriptors on rank 0. None on other ranks, which return while rank 0 still writes.
    """
    describer, images, world = extraction.describer, extraction.images, extraction.world
    boxes = json.dumps(sorted(extraction.numbered_boxes.items())).encode()
    plan = {
        "version": PLAN_VERSION,
        "fingerprint": images.fingerprint,
        "images": len(images),
        "described_by": asdict(describer.described_by),
        "precision": describer.precision,
        "scaled_decoding": describer.scaled,
        "max_pixels": describer.max_pixels,
        "boxes": hashlib.sha256(boxes).hexdigest() if extraction.boxes else None,
        "dtype": dtype,
        "form": form,
        "part_images": part_images or extraction.part_size,
    }
    # Only rank 0 needs the folder.
    size = torch.zeros(1, dtype=torch.int64, device=world.device)
    stored: DescriptorSet | None = None
    if world.rank == 0:
        with suppress(DistapError):
            stored = read_descriptors(output)
        size.fill_(_begin(output, plan))
    parts = extraction.parts(int(world.broadcast(size)))
    done = torch.zeros(len(parts), dtype=torch.uint8, device=world.device)
    if world.rank == 0:
        for number in range(len(done)):
            done[number] = stored is not None or (output / PARTS_FOLDER / _part_name(number)).exists()
    missing = np.flatnonzero(~world.broadcast(done).bool().cpu()).tolist()
    before = len(images) - sum(len(parts[number]) for number in missing)
    if before and world.rank == 0:
        logger.info("%s: %d of %d images are described already", output, before, len(images))
    outbox = Outbox(world, lambda name, data: write_whole(output / PARTS_FOLDER / name, data))
    for number, part in extraction.described(parts, missing, outbox):
        outbox.add(_part_name(number), part_file(part, dtype))
    if world.rank > 0:
        return None
    if stored is None:
        stored = _join_parts(extraction, output, len(parts), dtype, form)
    shutil.rmtree(output / PARTS_FOLDER, ignore_errors=True)
    return stored


def left_out_of(output: Path) -> dict[str, str]:
    """Reason by name for each image that could not be described."""
    path = output / LEFT_OUT_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise DistapError(f"{path}: not readable: {error}; remove {output} and extract again") from error
    return {name: reason for name, _, reason in (line.partition("\t") for line in lines)}


def part_file(part: DescribedPart, dtype: str) -> bytes:
    """Return the contents of a part's file."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        samples=part.samples,
        descriptors=part.descriptors.astype(dtype, copy=False),
        left_out=np.array(list(part.left_out), dtype=np.int64),
        reasons=np.array(list(part.left_out.values()), dtype=np.str_),
    )
    return buffer.getvalue()


def _part_name(number: int) -> str:
    return f"{number:06d}.npz"


@contextmanager
def _open_part(output: Path, number: int) -> Iterator[Any]:
    """Open the arrays of a part, each of which is read on access. A damaged part is removed."""
    path = output / PARTS_FOLDER / _part_name(number)
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except Exception as error:  # zipfile, zlib and numpy raise many kinds
        path.unlink(missing_ok=True)
        raise DistapError(
            f"{path}: damaged on the disk ({error}), and removed; the same command describes this part again"
        ) from error


def _begin(output: Path, plan: dict[str, Any]) -> int:
    """Write the plan into a new or empty folder, or require the same plan there. Return its images of a part."""
    path = output / PLAN_FILE
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        write_whole(path, json.dumps(plan, indent=2) + "\n")
        return int(plan["part_images"])
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        part_images = int(earlier["part_images"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DistapError(f"{output}: holds something that is no extraction; choose another folder") from error
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
    return part_images


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan as JSON returns it, with the fields of `described_by` on the top level."""
    levels = json.loads(json.dumps(plan))
    inner = levels.pop("described_by", None)
    return {**levels, **(inner if isinstance(inner, dict) else {"described_by": inner})}


def _join_parts(extraction: Extraction, output: Path, parts: int, dtype: DType, form: Form) -> DescriptorSet:
    """Write one array of all parts in the order of the data set, without holding it in memory."""
    describer, images = extraction.describer, extraction.images
    left_out: dict[int, str] = {}
    present = np.zeros(len(images), dtype=bool)
    for number in range(parts):
        with _open_part(output, number) as part:
            present[part["samples"]] = True
            left_out.update(zip(part["left_out"].tolist(), part["reasons"].tolist(), strict=True))
    if not present.any():
        shutil.rmtree(output / PARTS_FOLDER, ignore_errors=True)
        first = next(iter(left_out.values()), "")
        raise DistapError(f"{images.name}: none of its {len(images)} images can be described; first: {first}")
    row = np.cumsum(present) - 1
    # Parquet is written from a temporary array among the parts.
    path = (output if form == "npy" else output / PARTS_FOLDER) / DESCRIPTORS_FILE
    array = new_descriptors(path, (int(present.sum()), describer.dimensions), dtype)
    for number in range(parts):
        with _open_part(output, number) as part:
            array[row[part["samples"]]] = part["descriptors"]
    names = [(str(images.keys[sample]), reason) for sample, reason in sorted(left_out.items())]
    names += images.left_out
    (output / LEFT_OUT_FILE).unlink(missing_ok=True)
    if names:
        lines = (f"{_one_line(name)}\t{_one_line(reason)}\n" for name, reason in names)
        write_whole(output / LEFT_OUT_FILE, "".join(lines))
    keys, classes = images.keys[present], images.classes[present]
    joined = DescriptorSet(array, keys, classes, describer.described_by, images.name)
    write_descriptors(output, joined, form)
    return joined


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()
