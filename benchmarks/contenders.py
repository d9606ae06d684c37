"""One training step on the same batch, done in the ways that `python -m benchmarks step` compares.

Each is written as one would meet it: the bare passes, autograd over the full batch, gradients cached between two
passes, and distap. All but the bare passes end with the same optimiser's update, at a learning rate of zero, so that
every step is the same work on the same numbers.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.materialised import materialised_loss
from distap.engine.ddp import DDPEngine
from distap.engine.precision import Precision
from distap.model.backbone import TimmBackbone
from distap.model.network import RetrievalNetwork, build_network
from distap.model.pooling import GeMPooling
from distap.model.weights import FileWeights, PackageWeights, RandomWeights, TimmWeights
from distap.ranking.loss import Loss
from distap.stages.micro_batches import MicroBatchSizes, Rows, cut
from distap.step import ThreeStageStep
from distap.stopwatch import Stopwatch
from distap.world import World


class SeededBatch:
    """A rank's share of images of classes, made from a seed: a coarse pattern of the class under noise.

    Args:
        total: B.
        image_size: width and height, pixels.
        images_a_class: P.
        world: the ranks; the images are the same on any number of them.
    """

    step = 0

    def __init__(self, total: int, image_size: int, images_a_class: int, world: World) -> None:
        self.total = total
        self.samples = world.slots(total)
        self.labels = torch.tensor(self.samples) // images_a_class
        self.present = torch.ones(len(self.samples), dtype=torch.bool)
        shape = (len(self.samples), 3, image_size, image_size)
        self.pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=world.device.type == "cuda")
        cells = torch.arange(image_size) * 8 // image_size
        for row, slot in enumerate(self.samples):
            of_class = torch.Generator().manual_seed(slot // images_a_class)
            pattern = torch.randint(0, 128, (3, 8, 8), generator=of_class, dtype=torch.uint8)
            own = torch.Generator().manual_seed(2**32 + slot)
            noise = torch.randint(0, 128, shape[1:], generator=own, dtype=torch.uint8)
            self.pixels[row] = pattern[:, cells][:, :, cells] + noise

    def images(self, rows: Rows) -> Tensor:
        """Pixels of some of the share's images."""
        return self.pixels[rows]

    def blank(self, rows: Tensor) -> None:
        """Make these images black."""
        self.pixels[rows] = 0


@dataclass(frozen=True)
class Task:
    """What every contender is given.

    Args:
        network: the one that each takes a copy of.
        batch: this rank's share.
        micro_batch: images of a micro-batch.
        loss: over the global batch.
        world: the ranks.
        precision: what the network computes in.
    """

    network: nn.Module
    batch: SeededBatch
    micro_batch: int
    loss: Loss
    world: World
    precision: Precision

    @property
    def micro_batches(self) -> list[slice]:
        """This rank's share in micro-batches."""
        return cut(0, len(self.batch.samples), self.micro_batch)

    def images(self, rows: Rows) -> Tensor:
        """Pixels of some images, on the device."""
        return self.batch.images(rows).to(self.world.device, non_blocking=True)


class Floor:
    """The network's own arithmetic: its forward passes, and its backward pass from a gradient that is there.

    Args:
        task: what is trained on.
        describes: whether every image is described without a graph first.
    """

    optimizer: Optimizer | None = None

    def __init__(self, task: Task, describes: bool) -> None:
        self.name = "floor, 2f + 1b" if describes else "floor, 1f + 1b"
        self.forwards = 2.0 if describes else 1.0
        self._task, self._describes = task, describes
        self._network = copy.deepcopy(task.network)
        generator = torch.Generator().manual_seed(0)
        dimensions = int(self._network.dimensions)  # type: ignore[arg-type]
        gradient = torch.randn(task.micro_batch, dimensions, generator=generator)
        self._gradient = gradient.to(task.world.device)

    def __call__(self) -> None:
        """All passes over this rank's images."""
        task = self._task
        if self._describes:
            with torch.no_grad():
                for rows in task.micro_batches:
                    with task.precision.autocast():
                        self._network(task.images(rows))
        for rows in task.micro_batches:
            with task.precision.autocast():
                descriptors = self._network(task.images(rows))
            descriptors.backward(self._gradient[: len(descriptors)])
        self._network.zero_grad(set_to_none=True)


class ThreeStages:
    """distap.

    Args:
        task: what is trained on.
        keep: micro-batches of this rank whose graph is kept.
    """

    def __init__(self, task: Task, keep: int) -> None:
        count = len(task.micro_batches)
        kept = "graphs kept" if keep >= count else f"{keep} of {count} kept"
        self.name = f"distap, {kept}" if keep else "distap"
        network = copy.deepcopy(task.network)
        self.optimizer = _optimizer(network)
        engine = DDPEngine(network, lambda: self.optimizer, task.world, precision=task.precision)
        self._batch = task.batch
        self._step = ThreeStageStep(
            engine,
            task.loss,
            task.world,
            0,
            MicroBatchSizes(task.micro_batch, keep=keep),
            max_drift=float("inf"),  # bfloat16 has more of it than trainings tolerate by default
            stopwatch=Stopwatch(task.world.device),  # as in training, with what it costs
        )
        self.seconds = self._step.stopwatch.seconds
        self.left_out = 0

    def __call__(self) -> None:
        """One step."""
        result = self._step(self._batch, 0.0)
        self.forwards = 1 + result.replayed / self._batch.total
        self.left_out = self._batch.total - result.replayed - result.kept


class CachedGradients:
    """The published scheme (Gao et al. 2021, section 3.2), in plain PyTorch.

    A forward pass without a graph, the loss by autograd over the descriptors of all ranks, whose gradients are
    cached, and a second forward pass from the same random state, of which each micro-batch is sent its part of
    the cache. As there, replicas reduce with the last one.
    """

    name, forwards = "cached gradients", 2.0

    def __init__(self, task: Task) -> None:
        self._task = task
        network = copy.deepcopy(task.network)
        self.optimizer = _optimizer(network)
        self._replicas = _replicas(network, task.world)

    def __call__(self) -> None:
        """One step."""
        task = self._task
        states, parts = [], []
        for rows in task.micro_batches:
            states.append(_RandomState(task.world.device))
            with torch.no_grad(), task.precision.autocast():
                parts.append(self._replicas(task.images(rows)))
        cache = self._gradients(torch.cat(parts))
        for rows, state in zip(task.micro_batches, states, strict=True):
            with _reducing(self._replicas, rows.stop == len(task.batch.samples)):
                with state.restored(), task.precision.autocast():
                    descriptors = self._replicas(task.images(rows))
                (descriptors * cache[rows]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self, descriptors: Tensor) -> Tensor:
        leaves = descriptors.detach().requires_grad_()
        _loss_of_all(leaves, self._task).backward()
        assert leaves.grad is not None
        return leaves.grad


class FullBatch:
    """Autograd through the whole local batch at once, as one would write it where memory is no concern."""

    name, forwards = "full batch", 1.0

    def __init__(self, task: Task) -> None:
        self._task = task
        network = copy.deepcopy(task.network)
        self.optimizer = _optimizer(network)
        self._replicas = _replicas(network, task.world)

    def __call__(self) -> None:
        """One step."""
        task = self._task
        with task.precision.autocast():
            descriptors = self._replicas(task.images(slice(None)))
        _loss_of_all(descriptors, task).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


Contender = Floor | ThreeStages | CachedGradients | FullBatch


def network_of(backbone: str, weights: str) -> RetrievalNetwork:
    """Return a network in training mode.

    Args:
        backbone: timm's name of it.
        weights: `random`, `timm`, a file with a suffix, or a package.
    """
    chosen: Any = {"random": RandomWeights(), "timm": TimmWeights()}.get(weights)
    if chosen is None:
        chosen = FileWeights(Path(weights)) if Path(weights).suffix else PackageWeights(weights)
    return build_network(TimmBackbone(backbone), chosen, GeMPooling()).train()


def _optimizer(network: nn.Module) -> Optimizer:
    return torch.optim.Adam(network.parameters(), lr=0.0)


def _replicas(network: nn.Module, world: World) -> nn.Module:
    return DistributedDataParallel(network) if world.size > 1 else network


def _reducing(replicas: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if is_last or not isinstance(replicas, DistributedDataParallel):
        return nullcontext()
    region: AbstractContextManager[None] = replicas.no_sync()
    return region


def _loss_of_all(descriptors: Tensor, task: Task) -> Tensor:
    """The loss of the global batch, differentiable in this rank's descriptors; times W, by which DDP divides."""
    world, total = task.world, task.batch.total
    everyone = world.gather_rows(descriptors.detach(), total).clone()
    everyone[world.rank :: world.size] = descriptors
    labels = world.gather_rows(task.batch.labels.to(world.device), total)
    return materialised_loss(task.loss, everyone, labels) * world.size


class _RandomState:
    """The state of torch's generators now, of the CPU and of a device."""

    def __init__(self, device: torch.device) -> None:
        self._devices: list[Any] = [device] if device.type == "cuda" else []
        self._cpu = torch.get_rng_state()
        self._states = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from that state within; the one outside is as before afterwards."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
