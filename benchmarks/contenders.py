"""A training step done in several ways on the same batch: bare passes, autograd, cached gradients, and distap.

Each is written as one would meet it. All but the bare passes end with an update of the same optimiser at a learning
rate of zero, so that every step does the same work on the same numbers.
"""

import ast
import copy
import importlib
import inspect
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.materialised import materialised_loss
from distap.data.images.augmentation import CropFlipColour
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob, ShareOfBatch
from distap.data.sampling.random import RandomSampling
from distap.data.shards.packing import pack
from distap.model.backbone import FileWeights, PackageWeights, RandomWeights, TimmBackbone, TimmWeights
from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import GeMPooling
from distap.multistage import Multistage
from distap.precision import PrecisionName, autocast, computing_in
from distap.ranking.loss import Loss
from distap.stages.micro_batches import Batch, MicroBatchSizes, Rows, cut
from distap.stages.replica import Replica
from distap.step import ThreeStages
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.training.learner import Learner
from distap.training.training_step import StepResult, TrainingStep
from distap.world import World

IMAGES_A_CLASS = 8


class SeededBatch:
    """A rank's share of `total` images, made from a seed: a coarse pattern of the class under noise.

    The images are the same on any number of ranks.
    """

    step = 0

    def __init__(self, total: int, image_size: int, images_a_class: int, world: World) -> None:
        self.total = total
        self.samples = torch.tensor(world.slots(total))
        self.labels = self.samples // images_a_class
        self.present = torch.ones(len(self.samples), dtype=torch.bool)
        shape = (len(self.samples), 3, image_size, image_size)
        self.pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=world.device.type == "cuda")
        cells = torch.arange(image_size) * 8 // image_size
        for row, slot in enumerate(self.samples.tolist()):
            of_class = torch.Generator().manual_seed(slot // images_a_class)
            pattern = torch.randint(0, 128, (3, 8, 8), generator=of_class, dtype=torch.uint8)
            own = torch.Generator().manual_seed(2**32 + slot)
            noise = torch.randint(0, 128, shape[1:], generator=own, dtype=torch.uint8)
            self.pixels[row] = pattern[:, cells][:, :, cells] + noise

    def images(self, rows: Rows) -> Tensor:
        return self.pixels[rows]

    def blank(self, rows: Tensor) -> None:
        self.pixels[rows] = 0


@contextmanager
def loaded_shares(
    batch: SeededBatch, image_size: int, chunk: int, world: World, stopwatch: Stopwatch
) -> Iterator[Iterator[ShareOfBatch]]:
    """Pack the images of a batch, without loss, and let distap's loader read them again and again, a batch per step.

    Args:
        chunk: images that a worker hands over at once.
        stopwatch: times the waiting for the loader, as `data_wait`.
    """
    with tempfile.TemporaryDirectory(prefix="distap-bench-") as own:
        folder = Path(world.gather_values(own)[0])
        for sample, label, pixels in zip(batch.samples.tolist(), batch.labels.tolist(), batch.pixels, strict=True):
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
            transform=CropFlipColour(crop=1, flip=0).transform(image_size),
            image_size=image_size,
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
    """Return a network in training mode; `weights` is random, timm, a file with a suffix, or a package.

    Some networks are built for one size of images.
    """
    torch.manual_seed(0)
    chosen: Any = {"random": RandomWeights(), "timm": TimmWeights()}.get(weights)
    if chosen is None:
        chosen = FileWeights(Path(weights)) if Path(weights).suffix else PackageWeights(weights)
    return build_network(TimmBackbone(backbone), chosen, GeMPooling(), image_size=image_size).train()


def adam(network: nn.Module) -> Optimizer:
    """Return the optimiser that all contenders use."""
    return torch.optim.Adam(network.parameters(), lr=0.0)


@dataclass(frozen=True)
class Task:
    """The network that each contender copies, this rank's share of the batch, and the settings of the step."""

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
    """The network's own passes: forward, without a graph as well if `describes`, and backward from any gradient."""

    optimizer: Optimizer | None = None

    def __init__(self, task: Task, describes: bool) -> None:
        self.forwards = 2.0 if describes else 1.0
        self._task, self._network = task, copy.deepcopy(task.network)
        gradient = torch.randn(task.micro_batch, task.network.dimensions, generator=torch.Generator().manual_seed(0))
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
        self._step = TrainingStep(stages, Learner(replica, self.optimizer, precision=task.precision))
        self.seconds: list[dict[str, float]] = []  # by stage, of each step
        self.forwards = 2.0
        self.result: StepResult

    def __call__(self) -> None:
        self.on(self._batch)

    def on(self, batch: Batch) -> None:
        """Do a step on another batch of the same size."""
        self.stopwatch.seconds.clear()
        self.result = self._step(batch, 0.0)
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


class FullBatch:
    """Autograd through the whole local batch at once, as one would write it if memory were no concern."""

    forwards = 1.0

    def __init__(self, task: Task) -> None:
        self._task = task
        self._network: nn.Module = copy.deepcopy(task.network)
        self.optimizer = adam(self._network)
        if task.world.size > 1:
            self._network = DistributedDataParallel(self._network)

    def __call__(self) -> None:
        task = self._task
        with task.autocast():
            descriptors = self._network(task.images(slice(None)))
        _loss_of_all(descriptors, task).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class CachedGradients(FullBatch):
    """The published scheme (Gao et al. 2021, section 3.2), in plain PyTorch.

    A forward pass without a graph; the loss by autograd over the descriptors of all ranks, whose gradients are
    cached; and a second forward pass from the same random state, of which each micro-batch is sent its part of the
    cache. As there, replicas reduce with the last one.
    """

    forwards = 2.0

    def __call__(self) -> None:
        task = self._task
        states, parts = [], []
        for rows in task.micro_batches:
            states.append(_random_state(task.world.device))
            with torch.no_grad(), task.autocast():
                parts.append(self._network(task.images(rows)))
        leaves = torch.cat(parts).detach().requires_grad_()
        _loss_of_all(leaves, task).backward()
        assert leaves.grad is not None
        for rows, state in zip(task.micro_batches, states, strict=True):
            with _reducing(self._network, rows.stop == len(task.batch.samples)):
                with _restored(state, task.world.device), task.autocast():
                    descriptors = self._network(task.images(rows))
                (descriptors * leaves.grad[rows]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class MultistageLoop(FullBatch):
    """distap's drop-in in a loop of one's own, with the caller's DistributedDataParallel and optimiser."""

    forwards = 2.0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        # bfloat16 drifts more than trainings tolerate by default
        self._multistage = Multistage(self._network, task.loss, task.micro_batch, max_drift=float("inf"))

    def __call__(self) -> None:
        with self._task.autocast():
            loss = self._multistage(self._task.batch.pixels, self._task.batch.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class GradCachePackage(FullBatch):
    """The package of Gao et al. (`pip install gradcache`), with a gathered loss by autograd.

    Raises:
        ImportError: it is not installed.
    """

    forwards = 2.0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        # The released package imports itself by another name than it is installed under.
        sys.modules.setdefault("grad_cache", importlib.import_module("gradcache"))
        package = importlib.import_module("gradcache.grad_cache")
        self._cache = package.GradCache([self._network], task.micro_batch, lambda rows: _loss_of_all(rows, task))

    def __call__(self) -> None:
        task = self._task
        with task.autocast():
            self._cache(task.images(slice(None)), no_sync_except_last=task.world.size > 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


Contender = Floor | DistapStep | FullBatch


def lines_of(contender: Contender) -> int | None:
    """Lines of code that a user writes for a step in her own loop; None for what is not one's own loop."""
    if not isinstance(contender, FullBatch):
        return None
    written: list[Callable[..., Any]] = [contender.__call__]
    written += [_loss_of_all] if not isinstance(contender, MultistageLoop) else []
    written += [_reducing, _random_state, _restored] if isinstance(contender, CachedGradients) else []
    texts = [ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(one)))) for one in written]
    made = 0 if type(contender) in (FullBatch, CachedGradients) else 1  # the object that is called
    return made + sum(len(text.splitlines()) - text.count('"""') // 2 for text in texts)


def _reducing(network: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if is_last or not isinstance(network, DistributedDataParallel):
        return nullcontext()
    region: AbstractContextManager[None] = network.no_sync()
    return region


def _loss_of_all(descriptors: Tensor, task: Task) -> Tensor:
    """The loss of the global batch, differentiable in this rank's descriptors; times W, by which DDP divides."""
    world, total = task.world, task.batch.total
    everyone = world.gather_rows(descriptors.detach(), total).clone()
    everyone[world.rank :: world.size] = descriptors
    labels = world.gather_rows(task.batch.labels.to(world.device), total)
    return materialised_loss(task.loss, everyone, labels) * world.size


def _random_state(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators, of the CPU and of a GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def _restored(state: list[Tensor], device: torch.device) -> Iterator[None]:
    """Draw from that state inside; the state outside is the same afterwards as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        for of_gpu in state[1:]:
            torch.cuda.set_rng_state(of_gpu, device)
        yield
