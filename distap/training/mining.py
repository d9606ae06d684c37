"""Find the classes that are nearest to each other, from which `sampling: mined` makes batches."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from distap.data.loading.indexed import IndexedImages
from distap.data.plan import Classes
from distap.data.sampling import MinedSampling
from distap.errors import logger
from distap.evaluation.extraction.extracting import Describing, Extraction, extract_descriptors
from distap.retrieval.row_blocks import installed_faiss, nearest


class NearestClasses:
    """The table of nearest classes by descriptors of an earlier step; part of a run's state.

    With it a batch is still a function of data set, seed, step and this table, on any number of
    ranks and after a restart. Each rank holds all descriptors while it is made.
    """

    def __init__(self, images: IndexedImages, sampling: MinedSampling) -> None:
        installed_faiss()  # an error now, not after all images are described
        self.images = images
        self._near = sampling.near

    def renew(self, describing: Describing) -> None:
        """Describe all training images, and compare the means of their classes, on all ranks."""
        started = time.perf_counter()
        classes = self.images.plan.classes
        samples, descriptors, _ = extract_descriptors(Extraction(describing, self.images.read_from))
        sums = torch.zeros(classes.count, descriptors.shape[1])
        sums.index_add_(0, torch.from_numpy(classes.labels[samples]), torch.from_numpy(descriptors))
        usable = torch.from_numpy(classes.with_pairs)
        means = normalize(sums[usable])
        neighbours = nearest(means, means, self._near - 1, exclude_self=True)[1]
        # Each class itself comes first.
        table = torch.arange(classes.count)[:, None].repeat(1, 1 + neighbours.shape[1])
        table[usable, 1:] = usable[torch.from_numpy(neighbours)]
        # A sum may differ in its last bit between hosts, so rank 0's table counts.
        self._use(describing.world.broadcast(table.to(describing.world.device)).cpu())
        logger.info("mined classes near each other in %.1f s", time.perf_counter() - started)

    def _use(self, table: Tensor) -> None:
        # Batches that were drawn are cached by plan and classes, so both must be new objects.
        plan = self.images.plan
        classes = Classes(plan.classes.labels, plan.classes.levels, table.numpy())
        self.images.plan = replace(plan, classes=classes)

    def state_dict(self) -> dict[str, Tensor]:
        table = self.images.plan.classes.nearest
        return {} if table is None else {"nearest": torch.from_numpy(table)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._use(state["nearest"])
