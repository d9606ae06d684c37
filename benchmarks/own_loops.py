"""A training step as one writes it in a loop of one's own: autograd, cached gradients, packages,
and Multistage.

Each ends with an update of the same optimiser. Its learning rate is zero unless one is set, so that
every step does the same work on the same numbers.
"""

import ast
import copy
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.contenders import DistapStep, Floor, Task, adam
from benchmarks.materialised import materialised_loss
from distap.multistage import Multistage
from distap.training.learner import set_rates

RATE_OF_PROXIES = 100  # times the network's, as Kim et al. 2020 train Proxy Anchor


class FullBatch:
    """Autograd through the whole local batch at once, as one would write it if memory were no
    concern.
    """

    forwards = 1.0

    def __init__(self, task: Task) -> None:
        self._task = task
        self.network = copy.deepcopy(task.network)
        self._network: nn.Module = self.network
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

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        set_rates(self.optimizer, rate)


class MetricLearningLoop(FullBatch):
    """The full batch with a loss of pytorch-metric-learning, and a miner for it, as its
    documentation shows them.

    Args:
        loss: a class of `losses`, with its defaults; proxies are trained too.
        miner: a class of `miners`.
    """

    def __init__(self, task: Task, loss: str, miner: str | None = None) -> None:
        super().__init__(task)
        losses, miners = (
            importlib.import_module(f"pytorch_metric_learning.{module_name}")
            for module_name in ("losses", "miners")
        )
        make = getattr(losses, loss)
        sizes = {"num_classes": task.batch.classes, "embedding_size": self.network.dimensions}
        self._loss = make(**(sizes if "num_classes" in inspect.signature(make).parameters else {}))
        self._miner = miner and getattr(miners, miner)()
        proxies = list(self._loss.parameters())
        if proxies:
            self.optimizer.add_param_group({"params": proxies, "factor": RATE_OF_PROXIES})

    def __call__(self) -> None:
        with self._task.autocast():
            descriptors = self._network(self._task.images(slice(None)))
        labels = self._task.batch.labels
        pairs = self._miner(descriptors, labels) if self._miner else None
        self._loss(descriptors, labels, pairs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class CachedGradients(FullBatch):
    """The published scheme (Gao et al. 2021, section 3.2), in plain PyTorch.

    A forward pass without a graph; the loss by autograd over the descriptors of all ranks, whose
    gradients are cached; and a second forward pass from the same random state, of which each
    micro-batch is sent its part of the cache. As there, replicas reduce with the last one.
    """

    forwards = 2.0

    def __call__(self) -> None:
        task = self._task
        states = []
        parts = []
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


class ReleasedRecallLoop(FullBatch):
    """The order of the trainer that Patel et al. released with RS@k, on one rank.

    A first pass whose graphs are built and freed; the loss by autograd, RS@k's query by query; and
    a second pass, for which no random state is restored.
    """

    forwards = 2.0

    def __call__(self) -> None:
        task = self._task
        parts = []
        for rows in task.micro_batches:
            with task.autocast():
                parts.append(self._network(task.images(rows)).detach())
        leaves = torch.cat(parts).requires_grad_()
        _loss_of_all(leaves, task).backward()
        assert leaves.grad is not None
        for rows in task.micro_batches:
            with task.autocast():
                descriptors = self._network(task.images(rows))
            descriptors.backward(leaves.grad[rows])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class MultistageLoop(FullBatch):
    """distap's drop-in in a loop of one's own, with the caller's DistributedDataParallel and
    optimiser.
    """

    forwards = 2.0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        # bfloat16 drifts more than trainings tolerate by default
        self._multistage = Multistage(
            self._network, task.loss, task.micro_batch, max_drift=float("inf")
        )

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
        self._cache = package.GradCache(
            [self._network], task.micro_batch, lambda rows: _loss_of_all(rows, task)
        )

    def __call__(self) -> None:
        task = self._task
        with task.autocast():
            self._cache(task.images(slice(None)), no_sync_except_last=task.world.size > 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class SentenceTransformersCache(FullBatch):
    """The gradient cache of sentence-transformers, with a loss of one's own in it.

    Raises:
        ImportError: it is not installed.
    """

    forwards = 2.0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        network = self._network
        caching = importlib.import_module("sentence_transformers.base.losses.gradcache")

        class CachedLoss(caching.CachedLossMixin):  # type: ignore[name-defined]
            mini_batch_size = task.micro_batch

            def model(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
                return {"sentence_embedding": network(features["pixel_values"])}

            def calculate_loss(
                self, reps: list[list[Tensor]], *_: Any, with_backward: bool
            ) -> Tensor:
                loss = _loss_of_all(torch.cat(reps[0]), task)
                loss.backward()
                return loss.detach()

        self._loss = CachedLoss()

    def __call__(self) -> None:
        task = self._task
        with task.autocast():
            self._loss.forward_cached([{"pixel_values": task.images(slice(None))}]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class OMLPipeline(FullBatch):
    """A step of OML's Lightning pipeline, which takes the whole batch at once, with a loss of one's
    own in it.

    Raises:
        ImportError: it is not installed, or not with the Lightning that it needs (OML 4.0: below
            2.6).
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._lightning = importlib.import_module("pytorch_lightning")
        module = importlib.import_module("oml.lightning.modules.extractor").ExtractorModule
        self._module = module(
            self._network, lambda descriptors, _: _loss_of_all(descriptors, task), self.optimizer
        )

    def __call__(self) -> None:
        task = self._task
        trainer = self._lightning.Trainer(
            max_steps=1,
            enable_model_summary=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        batch = {"input_tensors": task.images(slice(None)), "labels": task.batch.labels}
        trainer.fit(self._module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


Contender = Floor | DistapStep | FullBatch
# that cache gradients, and are measured where installed
PACKAGES: dict[str, tuple[str, type[FullBatch]]] = {
    "gradcache package": ("gradcache", GradCachePackage),
    "sentence-transformers": ("sentence_transformers", SentenceTransformersCache),
}


def lines_of(contender: Contender) -> int | None:
    """Lines of code that a user writes for a step in her own loop.

    None for what is not one's own loop.
    """
    if not isinstance(contender, FullBatch):
        return None
    written: list[Callable[..., Any]] = [contender.__call__]
    written += [_loss_of_all] if not isinstance(contender, MultistageLoop) else []
    written += (
        [_reducing, _random_state, _restored] if isinstance(contender, CachedGradients) else []
    )
    texts = [
        ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(written_object))))
        for written_object in written
    ]
    made = 0 if type(contender) in (FullBatch, CachedGradients) else 1  # the object that is called
    return made + sum(len(text.splitlines()) - text.count('"""') // 2 for text in texts)


def _reducing(network: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if is_last or not isinstance(network, DistributedDataParallel):
        return nullcontext()
    region: AbstractContextManager[None] = network.no_sync()
    return region


def _loss_of_all(descriptors: Tensor, task: Task) -> Tensor:
    """The loss of the global batch, differentiable in this rank's descriptors.

    Times W, by which DDP divides.
    """
    world = task.world
    total = task.batch.total
    everyone = world.gather_rows(descriptors.detach(), total).clone()
    everyone[world.rank :: world.size] = descriptors
    labels = world.gather_rows(task.batch.labels.to(world.device), total)
    return materialised_loss(task.loss, everyone, labels) * world.size


def _random_state(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators, of the CPU and of a GPU."""
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
    ]


@contextmanager
def _restored(state: list[Tensor], device: torch.device) -> Iterator[None]:
    """Draw from that state inside; the state outside is the same afterwards as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        for of_gpu in state[1:]:
            torch.cuda.set_rng_state(of_gpu, device)
        yield
