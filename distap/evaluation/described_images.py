"""Descriptors of `distap extract` in place of the images of a training or an evaluation set."""

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from distap.data.images.boxes import Box
from distap.data.loading.indexed import IndexedImages
from distap.data.loading.reader import ImageSet
from distap.data.loading.share import Chunk, LoadingJob
from distap.data.shards.image_files import ImageFile
from distap.data.shards.image_folders import warn_of
from distap.data.shards.index import index_of_files
from distap.errors import DistapError, logger
from distap.evaluation.extraction.extracting import Describing, Extraction, extract_descriptors
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.evaluation.row_folder import RowFolder
from distap.model.network import RetrievalNetwork, UnitLinear, fingerprint
from distap.retrieval.descriptor_files import DescribedBy, read_descriptors
from distap.retrieval.row_blocks import DescriptorParts, row_blocks
from distap.stopwatch import Stopwatch
from distap.storage.locations import Source
from distap.world import World


class DescribedImages(ImageSet):
    """N images with classes, of which only the descriptors in a folder of `distap extract` are
    known.
    """

    def __init__(self, source: Source) -> None:
        stored = self.stored = read_descriptors(Path(source.base))
        stored.require_one_network("they stand for what one network gives to its head")
        without = int((stored.classes == "").sum())
        if without:
            raise DistapError(
                "data.no_classes",
                f"{source}: {without:,} of its {len(stored):,} images have no class",
            )
        keys: list[str] = stored.keys.tolist()
        images = [
            ImageFile(Path(key), label)
            for key, label in zip(keys, stored.classes.tolist(), strict=True)
        ]
        super().__init__(
            source, index_of_files(source, keys, keys, images, 0, stored.described_by.network)
        )

    def rows_for(self, network: RetrievalNetwork) -> NDArray[np.floating]:
        """Return the (N, C) descriptors, if they are what this network gives to its head.

        Raises:
            DistapError: this network without its head has not described them, or not at one scale
                and unwhitened.
        """
        described_by = self.stored.described_by
        headless = fingerprint(network, with_head=False)
        if described_by.network != headless:
            raise DistapError(
                "descriptors.other_network",
                f"{self.name}: the network {described_by.network[:12]} has described it, but"
                f" without a projection this one is {headless[:12]}: set model.weights to"
                " {name: run, path: RUN} of the run that `distap extract` took, or extract with"
                " `--checkpoint RECIPE`, this recipe",
            )
        problem = ""
        if described_by.scales != (1.0,):
            problem = f"at the scales {list(described_by.scales)}"
        elif described_by.whitening is not None or described_by.dimensions is not None:
            problem = "whitened, or cut"
        if problem:
            raise DistapError(
                "descriptors.no_head",
                f"{self.name}: described {problem}, where no head can stand: extract without",
            )
        if not isinstance(network.head, UnitLinear | nn.Identity):
            raise DistapError(
                "descriptors.no_head",
                f"{self.name}: its descriptors have length 1: set model.unit_length: true",
            )
        return self.stored.descriptors

    def described_by(self, describer: ImageDescriber) -> NDArray[np.float32]:
        """Return the (N, D) descriptors after the describer's head and whitening."""
        if describer.network.scales != (1.0,):
            raise DistapError(
                "descriptors.no_scales",
                f"{self.name}: descriptors have no scales: set evaluation.scales to [1]",
            )
        rows = self.rows_for(describer.retrieval_network)
        with describer.evaluating():
            blocks = [
                describer(torch.from_numpy(block)).to("cpu", torch.float32).numpy()
                for _, block in row_blocks(rows, np.float32)
            ]
        return np.concatenate(blocks)


@dataclass(frozen=True)
class StoredDescriber:
    """Answer what an evaluation asks of a describer, with descriptors that are stored."""

    described_by: DescribedBy
    dimensions: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    whitening: None = None


@dataclass(frozen=True)
class StoredDescribing(Describing):
    """Descriptors in a folder, joined to images by name, in place of a network's."""

    rows: RowFolder | None = None

    def of_images(
        self, images: ImageSet, boxes: Mapping[int, Box]
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return image numbers and descriptors, without images that the folder left out.

        Raises:
            DistapError: another image has no descriptor, or parts of images are queries.
        """
        assert self.rows is not None
        if boxes:
            raise DistapError(
                "descriptors.parts_of_images",
                f"{self.rows.where}: its descriptors are of whole images, but queries of"
                f" {images.name} are cut to their boxes: give the run in place of the folder",
            )
        samples = np.flatnonzero(~np.isin(images.keys, [*self.rows.stored.left_out]))
        places = self.rows.require(images.keys[samples], images.name)
        return samples, self.rows.stored.descriptors[places]


def stored_describing(rows: RowFolder, world: World) -> StoredDescribing:
    """Return how an evaluation reads descriptors that are stored."""
    stored = rows.stored
    # An evaluation asks its describer for no more than these: nothing is described.
    describer = StoredDescriber(stored.described_by, stored.descriptors.shape[1])
    return StoredDescribing(cast(ImageDescriber, describer), world, rows=rows)


def descriptors_of(
    describing: Describing, images: ImageSet, boxes: Mapping[int, Box]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return image numbers (n,), ascending, without failed images, and descriptors (n, D), on every
    rank.

    Args:
        boxes: by image number, the part of an image to describe, in pixels.
    """
    if isinstance(describing, StoredDescribing):
        return describing.of_images(images, boxes)
    if isinstance(images, DescribedImages):
        return np.arange(len(images)), images.described_by(describing.describer)
    samples, descriptors, reasons = extract_descriptors(Extraction(describing, images, boxes))
    left_out = {str(images.keys[number]): reason for number, reason in reasons.items()}
    if describing.world.rank == 0:
        warn_of(images.name, images.index.left_out)
        for key in left_out.keys() - dict(images.index.left_out).keys():
            logger.warning(
                "left out of the evaluation: %s of %s: %s", key, images.name, left_out[key]
            )
    return samples, descriptors


class DescribedTraining(IndexedImages):
    """Descriptors in place of training images, drawn by the plan of batches and never augmented."""

    keeps_shards = False

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        # of each data set
        self.described = list[DescribedImages]()
        super().__init__(job, world, stopwatch)
        dimensions = {images.stored.descriptors.shape[1] for images in self.described}
        if len(dimensions) > 1:
            raise DistapError(
                "data.unequal_dimensions",
                f"data.train: descriptors of {', '.join(map(str, sorted(dimensions)))} dimensions:"
                " those of all sets have to come from one network",
            )
        self.job = replace(job, dimensions=dimensions.pop())

    def opened(self, source: Source) -> DescribedImages:
        images = DescribedImages(source)
        self.described.append(images)
        return images

    def chunks(self, steps: range) -> Generator[Chunk]:
        classes = self.plan.classes
        rows = DescriptorParts(
            [(images.name, images.stored.descriptors) for images in self.described]
        )
        first = np.cumsum([0, *map(len, self.described)])
        for step in steps:
            samples = self.plan.batch(step)[np.array(self.places)]
            labels = classes.numbers[classes.labels_of(samples)]
            numbers = np.searchsorted(first, samples, side="right") - 1
            places = zip(numbers.tolist(), (samples - first[numbers]).tolist(), strict=True)
            names = [str(self.described[number].keys[local]) for number, local in places]
            values = rows[samples].astype(np.float32, copy=False)
            yield Chunk(values, samples.tolist(), labels, names, [], Counter())
