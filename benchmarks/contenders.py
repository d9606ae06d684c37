"""A training step on a seeded batch: bare passes, and distap's own step. benchmarks/own_loops.py
has the other ways.

All but the bare passes end with an update of the same optimiser. Its learning rate is zero unless
one is set, so that every step does the same work on the same numbers.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.photos import pack
from distap.config.sections import PrecisionName
from distap.data.images.augmentation import CropFlipColour
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob, ShareOfBatch
from distap.data.sampling import RandomSampling
from distap.model.backbone import TimmBackbone
from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import GeMPooling
from distap.model.weights import FileWeights, PackageWeights, RandomWeights, TimmWeights
from distap.ranking.loss import Loss
from distap.stages.micro_batches import Batch, MicroBatchSizes, Rows, cut
from distap.stages.replica import Replica, autocast, computing_in
from distap.stages.step import ThreeStages
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.training.learner import Learner, StepResult, TrainingStep
from distap.world import World

IMAGES_A_CLASS = 8


class SeededBatch:
    """A rank's share of `total` images, made from a seed: a coarse pattern of the class under
    noise.

    The images are the same on any number of ranks.
    """

    step = 0
    order: Tensor | None = None

    def __init__(self, total: int, image_size: int, images_a_class: int, world: World) -> None:
        self.total = total
        self.classes = -(-total // images_a_class)
        self.samples = torch.tensor(world.slots(total))
        self.labels = self.samples // images_a_class
        self.present = torch.ones(len(self.samples), dtype=torch.bool)
        self.extra: dict[str, Tensor] = {}
        shape = (len(self.samples), 3, image_size, image_size)
        self.pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=world.device.type == "cuda")
        cells = torch.arange(image_size) * 8 // image_size
        for row, slot in enumerate(self.samples.tolist()):
            of_class = torch.Generator().manual_seed(slot // images_a_class)
            pattern = torch.randint(0, 128, (3, 8, 8), generator=of_class, dtype=torch.uint8)
            generator_of_labels = torch.Generator().manual_seed(2**32 + slot)
            noise = torch.randint(
                0, 128, shape[1:], generator=generator_of_labels, dtype=torch.uint8
            )
            self.pixels[row] = pattern[:, cells][:, :, cells] + noise

    def images(self, rows: Rows) -> Tensor:
        return self.pixels[rows]

    def blank(self, rows: Tensor) -> None:
        self.pixels[rows] = 0


@contextmanager
def loaded_shares(
    batch: SeededBatch, image_size: int, chunk: int, world: World, stopwatch: Stopwatch
) -> Iterator[Iterator[ShareOfBatch]]:
    """Pack the images of a batch, without loss, and let distap's loader read them again and again,
    a batch per step.

    Args:
        chunk: images that a worker hands over at once.
        stopwatch: times the waiting for the loader, as `data_wait`.
    """
    with tempfile.TemporaryDirectory(prefix="distap-bench-") as temporary_folder:
        folder = Path(world.gather_values(temporary_folder)[0])
        for sample, label, pixels in zip(
            batch.samples.tolist(), batch.labels.tolist(), batch.pixels, strict=True
        ):
            path = folder / "images" / f"{label:06}" / f"{sample:06}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path, compress_level=1)
        world.barrier()
        if world.rank == 0:
            pack(folder / "images", folder / "shards")
        world.barrier()
        job = LoadingJob(
            parse_source(folder / "shards"),
            RandomSampling(batch_size=batch.total),
            seed=0,
            sizes=((0, image_size, CropFlipColour(crop=1, flip=0).transform(image_size)),),
            chunk=chunk,
            workers=1,
        )
        shares = IndexedSource().open(job, world, stopwatch).shares(range(1_000_000))
        try:
            yield shares
        finally:
            shares.close()  # the worker ends before its shards are removed
            world.barrier()


def seeded_network(backbone: str, weights: str, image_size: int | None = None) -> RetrievalNetwork:
    """Return a network in training mode.

    `weights` is random, timm, a file with a suffix, or a package.

    Some networks are built for one size of images.
    """
    torch.manual_seed(0)
    chosen: Any = {"random": RandomWeights(), "timm": TimmWeights()}.get(weights)
    if chosen is None:
        chosen = FileWeights(Path(weights)) if Path(weights).suffix else PackageWeights(weights)
    return build_network(
        TimmBackbone(backbone), chosen, GeMPooling(), image_size=image_size
    ).train()


def adam(network: nn.Module) -> Optimizer:
    """Return the optimiser that all contenders use."""
    return torch.optim.Adam(network.parameters(), lr=0.0)


@dataclass(frozen=True)
class Task:
    """The network that each contender copies, this rank's share of the batch, and the settings of
    the step.
    """

    network: RetrievalNetwork
    batch: SeededBatch
    micro_batch: int
    loss: Loss
    world: World
    precision: PrecisionName = "float32"

    def autocast(self) -> AbstractContextManager[None]:
        return autocast(self.precision, self.world.device.type)

    @property
    def micro_batches(self) -> list[slice]:
        return cut(0, len(self.batch.samples), self.micro_batch)

    def images(self, rows: Rows) -> Tensor:
        return self.batch.images(rows).to(self.world.device, non_blocking=True)


class Floor:
    """The network's own passes: forward, without a graph as well if `describes`, and backward from
    any gradient.
    """

    optimizer: Optimizer | None = None

    def __init__(self, task: Task, describes: bool) -> None:
        self.forwards = 2.0 if describes else 1.0
        self._task = task
        self._network = copy.deepcopy(task.network)
        gradient = torch.randn(
            task.micro_batch, task.network.dimensions, generator=torch.Generator().manual_seed(0)
        )
        self._gradient = gradient.to(task.world.device)

    def __call__(self) -> None:
        task = self._task
        if self.forwards > 1:
            for rows in task.micro_batches:
                with torch.no_grad(), task.autocast():
                    self._network(task.images(rows))
        for rows in task.micro_batches:
            with task.autocast():
                descriptors = self._network(task.images(rows))
            descriptors.backward(self._gradient[: len(descriptors)])
        self._network.zero_grad(set_to_none=True)


class DistapStep:
    """distap's step.

    Args:
        keep: micro-batches of this rank whose graph is kept.
        change: is given the copy of the network to change.
    """

    def __init__(
        self,
        task: Task,
        keep: int = 0,
        change: Callable[[RetrievalNetwork], object] | None = None,
    ) -> None:
        self.network = copy.deepcopy(task.network)
        if change:
            change(self.network)
        self.optimizer = adam(self.network)
        self.stopwatch = Stopwatch(task.world.device)  # as in training, so that its cost counts
        self._batch = task.batch
        replica = Replica(self.network, task.world, computing_in(task.precision, self.network))
        stages = ThreeStages(
            replica,
            task.loss,
            task.world,
            0,
            MicroBatchSizes(task.micro_batch, keep=keep),
            max_drift=float("inf"),  # bfloat16 drifts more than trainings tolerate by default
            stopwatch=self.stopwatch,
        )
        self._step = TrainingStep(stages, Learner(replica, self.optimizer))
        self.learning_rate = 0.0
        self.seconds: list[dict[str, float]] = []  # by stage, of each step
        self.forwards = 2.0
        self.result: StepResult

    def __call__(self) -> None:
        self.on(self._batch)

    def on(self, batch: Batch) -> None:
        """Do a step on another batch of the same size."""
        self.stopwatch.seconds.clear()
        self.result = self._step(batch, self.learning_rate)
        self.forwards = 1 + self.result.replayed / batch.total
        self.seconds.append(dict(self.stopwatch.seconds))


class LoadedStep(DistapStep):
    """distap's step on the shares that distap's loader hands over, as in a training."""

    def __init__(self, task: Task, stack: ExitStack) -> None:
        super().__init__(task)
        size = task.batch.pixels.shape[-1]
        self._shares = stack.enter_context(
            loaded_shares(task.batch, size, task.micro_batch, task.world, self.stopwatch)
        )

    def __call__(self) -> None:
        self.on(next(self._shares))
