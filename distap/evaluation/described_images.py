"""Descriptors of `distap extract` in place of the images of a training or an evaluation set."""

from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from distap.data.loading.reader import ImageSet
from distap.data.loading.share import Chunk, LoadingJob, TrainingImages
from distap.data.plan import Plan
from distap.data.shards.image_files import ImageFile
from distap.data.shards.index import Index, index_of_files
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.network import RetrievalNetwork, UnitLinear, fingerprint
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.row_blocks import row_blocks
from distap.stopwatch import Stopwatch
from distap.storage.locations import Source
from distap.world import World


class DescribedImages(ImageSet):
    """N images with classes, of which only the descriptors in a folder of `distap extract` are
    known.
    """

    def __init__(self, source: Source) -> None:
        stored = self.stored = read_descriptors(Path(source.base))
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


class DescribedTraining(TrainingImages):
    """Descriptors in place of training images, drawn by the plan of batches and never augmented."""

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        self.described = DescribedImages(job.source)
        super().__init__(
            replace(job, dimensions=self.described.stored.descriptors.shape[1]), world, stopwatch
        )
        self.index: Index | None = self.described.index
        self.fingerprint = self.index.fingerprint
        self.plan = Plan(self.index.classes, job.sampling, job.seed)
        self.order = self.plan.version

    def chunks(self, steps: range) -> Generator[Chunk]:
        rows = self.described.stored.descriptors
        keys = self.described.keys
        classes = self.plan.classes
        for step in steps:
            samples = self.plan.batch(step)[np.array(self.slots)]
            labels = classes.numbers[classes.labels[samples]]
            values = rows[samples].astype(np.float32, copy=False)
            yield Chunk(values, samples.tolist(), labels, keys[samples].tolist(), [], Counter())
