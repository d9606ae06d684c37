"""Find the classes that are nearest to each other, from which `sampling: mined` makes batches."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from distap.data.joined import MixedImages
from distap.data.loading.indexed import IndexedImages
from distap.data.loading.reader import ImageSet
from distap.data.plan import Classes, MixedClasses
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
        self.every = sampling.every
        self._near = sampling.near

    def renew(self, describing: Describing) -> None:
        """Describe all training images, and compare the means of their classes, on all ranks.

        Of several data sets, each is a pool of its own.
        """
        started = time.perf_counter()
        images = self.images.read_from
        sets = images.sets if isinstance(images, MixedImages) else (images,)
        tables = [
            self._nearest(describing, of_set, classes)
            for of_set, (_, classes) in zip(sets, self.images.plan.classes.parts, strict=True)
        ]
        self._use(tables)
        logger.info("mined classes near each other in %.1f s", time.perf_counter() - started)

    def _nearest(self, describing: Describing, images: ImageSet, classes: Classes) -> Tensor:
        """Return (K, m) the classes nearest to each of a data set, itself first."""
        samples, descriptors, _ = extract_descriptors(Extraction(describing, images))
        sums = torch.zeros(classes.count, descriptors.shape[1])
        sums.index_add_(0, torch.from_numpy(classes.labels[samples]), torch.from_numpy(descriptors))
        usable = torch.from_numpy(classes.with_pairs)
        means = normalize(sums[usable])
        neighbours = nearest(means, means, self._near - 1, exclude_self=True)[1]
        # Each class itself comes first.
        table = torch.arange(classes.count)[:, None].repeat(1, 1 + neighbours.shape[1])
        table[usable, 1:] = usable[torch.from_numpy(neighbours)]
        # A sum may differ in its last bit between hosts, so rank 0's table counts.
        world = describing.world
        return world.broadcast(table.to(world.device)).cpu()

    def _use(self, tables: Sequence[Tensor]) -> None:
        # Batches that were drawn are cached by plan and classes, so both must be new objects.
        plan = self.images.plan
        mined = [
            Classes(classes.labels, classes.levels, table.numpy(), classes.shards)
            for (_, classes), table in zip(plan.classes.parts, tables, strict=True)
        ]
        is_mixed = isinstance(plan.classes, MixedClasses)
        self.images.draw_by(replace(plan, classes=MixedClasses(mined) if is_mixed else mined[0]))

    def state_dict(self) -> dict[str, Tensor]:
        tables = [classes.nearest for _, classes in self.images.plan.classes.parts]
        return {
            _name(number): torch.from_numpy(table)
            for number, table in enumerate(tables)
            if table is not None
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._use([state[_name(number)] for number in range(len(self.images.plan.classes.parts))])


def _name(number: int) -> str:
    """Return the name of the table of a set: the first one's is that of a run with one set."""
    return f"nearest{number or ''}"
