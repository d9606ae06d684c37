"""Descriptors that `distap extract` wrote, in place of the images of a training or an evaluation
set.
"""

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
    """N images with classes in a folder of `distap extract`: their descriptors are known, and
    nothing else.
    """

    def __init__(self, source: Source) -> None:
        known = self.known = read_descriptors(Path(source.base))
        without = int((known.classes == "").sum())
        if without:
            raise DistapError(f"{source}: {without:,} of its {len(known):,} images have no class")
        keys: list[str] = known.keys.tolist()
        images = [
            ImageFile(Path(key), name)
            for key, name in zip(keys, known.classes.tolist(), strict=True)
        ]
        super().__init__(
            source, index_of_files(source, keys, keys, images, 0, known.described_by.network)
        )

    def rows_for(self, network: RetrievalNetwork) -> NDArray[np.floating]:
        """Return the (N, C) descriptors, as what this network gives to its head.

        Raises:
            DistapError: this network without its head has not described them, or not at one scale
                and unwhitened.
        """
        by = self.known.described_by
        own = fingerprint(network, with_head=False)
        if by.network != own:
            raise DistapError(
                f"{self.name}: the network {by.network[:12]} has described it, but without a"
                f" projection this one is {own[:12]}: set model.weights to {{name: run, path: RUN}}"
                " of the run that `distap extract` took, or extract with `--checkpoint RECIPE`,"
                " this recipe"
            )
        if by.scales != (1.0,) or by.whitening is not None or by.dimensions is not None:
            how = f"at the scales {list(by.scales)}" if by.scales != (1.0,) else "whitened, or cut"
            raise DistapError(
                f"{self.name}: described {how}, where no head can stand: extract without"
            )
        if not isinstance(network.head, UnitLinear | nn.Identity):
            raise DistapError(
                f"{self.name}: its descriptors have length 1: set model.unit_length: true"
            )
        return self.known.descriptors

    def described_by(self, describer: ImageDescriber) -> NDArray[np.float32]:
        """Return the (N, D) descriptors behind the head of a describer's network, and behind its
        whitening.
        """
        if describer.network.scales != (1.0,):
            raise DistapError(
                f"{self.name}: descriptors have no scales: set evaluation.scales to [1]"
            )
        rows = self.rows_for(describer.retrieval_network)
        with describer.evaluating():
            parts = [
                describer(torch.from_numpy(block)).to("cpu", torch.float32).numpy()
                for _, block in row_blocks(rows, np.float32)
            ]
        return np.concatenate(parts)


class DescribedTraining(TrainingImages):
    """Descriptors in place of training images, drawn by the plan of batches and never augmented."""

    def __init__(self, job: LoadingJob, world: World, stopwatch: Stopwatch) -> None:
        self.described = DescribedImages(job.source)
        super().__init__(
            replace(job, dimensions=self.described.known.descriptors.shape[1]), world, stopwatch
        )
        self.index: Index | None = self.described.index
        self.fingerprint = self.index.fingerprint
        self.plan = Plan(self.index.classes, job.sampling, job.seed)
        self.order = self.plan.version

    def chunks(self, steps: range) -> Generator[Chunk]:
        rows = self.described.known.descriptors
        keys = self.described.keys
        classes = self.plan.classes
        for step in steps:
            samples = self.plan.batch(step)[np.array(self.slots)]
            labels = classes.numbers[classes.labels[samples]]
            values = rows[samples].astype(np.float32, copy=False)
            yield Chunk(values, samples.tolist(), labels, keys[samples].tolist(), [], Counter())
