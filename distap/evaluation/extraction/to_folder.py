"""Descriptors of a whole data set into a folder, by all ranks, going on where an earlier extraction stopped."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from distap.data.images.image_sets import ImageSet
from distap.errors import DistapError
from distap.evaluation.extraction.describer import ImageDescriber
from distap.evaluation.extraction.part_files import PartFiles, begin, figures_of, finish
from distap.evaluation.extraction.parts import (
    Meetings,
    boxes_by_number,
    describe_parts,
    part_size,
    plan_parts,
    require_same_images,
)
from distap.retrieval.descriptor_files import (
    DESCRIPTORS_FILE,
    DescriptorSet,
    Form,
    new_descriptors,
    read_descriptors,
    write_descriptors,
)
from distap.storage.atomic import write_whole
from distap.telemetry.terminal import counting
from distap.world import World

LEFT_OUT_FILE = "left_out.txt"
DType = Literal["float32", "float16"]
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Written:
    """What an extraction has written.

    Attributes:
        images: that were described.
        dimensions: of the descriptors.
        left_out: images that could not be described, named in LEFT_OUT_FILE.
        described_now: images that this call described, by all ranks; the others were there from an earlier one.
        batches: in which all images were described.
    """

    images: int
    dimensions: int
    left_out: int
    described_now: int
    batches: int


def extract_to_folder(
    describer: ImageDescriber,
    images: ImageSet,
    world: World,
    output: Path,
    boxes: Mapping[str, Sequence[float]] | None = None,
    *,
    dtype: DType = "float32",
    form: Form = "npy",
    workers: int = 2,
    part_images: int | None = None,
    shown: bool = False,
) -> Written | None:
    """Describe every image of a data set into a folder that `read_descriptors` reads.

    Each rank writes the parts that it has described; rank 0 puts them together. An extraction that was stopped goes
    on from its whole parts, on any number of ranks, when it is called again with the same images, describer and form.

    Args:
        describer: of the images, the same on every rank.
        images: the data set, the same on every rank.
        world: the ranks.
        output: a new or empty folder, or that of an extraction that was stopped; the same for all hosts.
        boxes: by key: the part of an image that counts, pixels; the whole of the others.
        dtype: of the descriptors in the files.
        form: `npy` for arrays, `parquet` for one file.
        workers: processes a rank that read; 0 reads in the rank itself.
        part_images: images of a part, which are lost when it is stopped; by default a 64th, 128 to 4096.
        shown: whether rank 0 shows a progress bar.
    Returns:
        What was written, on rank 0; nothing elsewhere, where this returns while rank 0 is still writing.
    Raises:
        DistapError: the folder holds something else, the ranks see different images, no image can be described, or
            a file cannot be written.
    """
    require_same_images(images, world)
    numbered = boxes_by_number(images, boxes)
    files = PartFiles(output)
    plan = _plan(describer, images, numbered, dtype, form, part_images or part_size(len(images)))
    is_finished = world.rank == 0 and _is_whole(output)
    size, done = _begun(files, plan, is_finished, world)
    parts = plan_parts(images, describer, numbered, size, world)
    missing = [number for number, is_done in enumerate(done) if not is_done]
    mine = missing[world.rank :: world.size]
    before = len(images) - sum(len(parts.parts[number]) for number in missing)
    if before and world.rank == 0:
        logger.info("%s: %d of %d images are described already", output, before, len(images))
    with counting(f"describing {images.name}", len(images), before, shown and world.rank == 0) as show:
        meetings = Meetings(world, show)
        described = describe_parts(describer, images, parts, mine, numbered, workers, meetings.report)
        for number, part in zip(mine, described, strict=True):
            files.write(number, part, dtype)
        meetings.finish()
    if world.rank > 0:
        return None
    figures = figures_of(output) if is_finished else _put_together(describer, images, files, len(done), dtype, form)
    files.remove()
    return Written(described_now=len(images) - before, **figures)


def left_out_of(output: Path) -> dict[str, str]:
    """Images of a finished extraction that could not be described, by name, and why.

    Raises:
        DistapError: what names them cannot be read.
    """
    path = output / LEFT_OUT_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise DistapError(f"{path}: not readable: {error}; remove {output} and extract again") from error
    pairs = (line.partition("\t") for line in lines)
    return {name: reason for name, _, reason in pairs}


def _plan(
    describer: ImageDescriber, images: ImageSet, boxes: Mapping[int, Any], dtype: DType, form: Form, size: int
) -> dict[str, Any]:
    return {
        "fingerprint": images.fingerprint,
        "images": len(images),
        "described_by": asdict(describer.described_by),
        "precision": describer.precision,
        "scaled_decoding": describer.scaled,
        "max_pixels": describer.max_pixels,
        "boxes": hashlib.sha256(json.dumps(sorted(boxes.items())).encode()).hexdigest() if boxes else None,
        "dtype": dtype,
        "form": form,
        "part_images": size,
    }


def _is_whole(output: Path) -> bool:
    """Whether a folder holds all descriptors of an extraction, undamaged as far as sizes tell."""
    try:
        read_descriptors(output)
    except DistapError:
        return False
    return True


def _begun(files: PartFiles, plan: dict[str, Any], is_finished: bool, world: World) -> tuple[int, list[bool]]:
    """Images of a part, and which parts are there: what rank 0 sees, since the others may see it later."""
    size = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0:
        size.fill_(int(begin(files.output, plan)["part_images"]))
    images_of_part = int(world.broadcast(size))
    done = torch.zeros(-(-plan["images"] // images_of_part), dtype=torch.uint8, device=world.device)
    if world.rank == 0:
        there = range(len(done)) if is_finished else files.written()
        done[[number for number in there if number < len(done)]] = 1
    return images_of_part, world.broadcast(done).bool().tolist()


def _put_together(
    describer: ImageDescriber, images: ImageSet, files: PartFiles, parts: int, dtype: DType, form: Form
) -> dict[str, int]:
    """One array of all parts in the order of the data set, which is never in memory as a whole."""
    left_out: dict[int, str] = {}
    present = np.zeros(len(images), dtype=bool)
    batches = 0
    for number in range(parts):
        samples, damaged, count = files.about(number)
        present[samples] = True
        left_out.update(damaged)
        batches += count
    if not present.any():
        first = next(iter(left_out.values()), "")
        files.remove()
        raise DistapError(f"{images.name}: none of its {len(images)} images can be described; first: {first}")
    row = np.cumsum(present) - 1
    # Parquet is written from an array that is not to stay.
    folder = files.output if form == "npy" else files.folder
    array = new_descriptors(folder / DESCRIPTORS_FILE, (int(present.sum()), describer.dimensions), dtype)
    for number in range(parts):
        samples, descriptors = files.descriptors(number)
        array[row[samples]] = descriptors
    names = [(str(images.keys[sample]), reason) for sample, reason in sorted(left_out.items())]
    names += images.left_out
    (files.output / LEFT_OUT_FILE).unlink(missing_ok=True)
    if names:
        lines = (f"{_on_a_line(name)}\t{_on_a_line(reason)}\n" for name, reason in names)
        write_whole(files.output / LEFT_OUT_FILE, "".join(lines))
    described = DescriptorSet(
        array, images.keys[present], images.classes[present], describer.described_by, images.name
    )
    figures = {"images": len(array), "dimensions": describer.dimensions, "left_out": len(names), "batches": batches}
    finish(files.output, figures)
    write_descriptors(files.output, described, form)
    return figures


def _on_a_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()
