"""The three stages for any training loop: a loss of a batch, then `loss.backward()`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, StrictInt
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from distap.errors import DistapError, checked, logger
from distap.model.pooling import NAMED, pooled
from distap.ranking.compiling import uncompiled
from distap.ranking.inputs import Extra, Inputs, TensorLike, agreement
from distap.ranking.listwise import KnownGradient, RankingModule
from distap.ranking.losses.base import DescriptorLoss
from distap.ranking.losses.building import AnyLoss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import Ranking
from distap.ranking.rankable import refuse_lengths
from distap.stages.exactness import evaluating
from distap.stages.fsdp import FSDPReplica
from distap.stages.given_batch import (
    GivenBatch,
    Outputs,
    are_alike,
    cut_along_rows,
    refuse_graphs,
    rows_of,
)
from distap.stages.micro_batches import MicroBatchSizes
from distap.stages.replica import (
    CallersReplica,
    ReplacedForward,
    refuse_exchanged,
    refuse_unusable,
    world_of,
)
from distap.stages.step import Described, ThreeStages
from distap.world import CPU, World, refuse_default_device


class Multistage(RankingModule):
    """The loss of a whole batch and its exact gradient, in the memory of one micro-batch.

    These are the three stages of Revaud et al. 2019:

        multistage = Multistage(network, loss="ap_q", micro_batch=16)
        loss = multistage(images, labels)  # describes without a graph, gathers, ranks
        loss.backward()                    # replays micro-batch by micro-batch

    Optimiser, schedule, clipping, autocast, GradScaler and gradient accumulation stay the caller's.

    On several ranks the batch is that of all of them, and `backward` reduces gradients once:

    - DistributedDataParallel, inside (`Multistage(DDP(network))`) or around
      (`DDP(Multistage(network))`, Lightning, Accelerate), reduces them as after any backward pass,
      and `no_sync` works as ever;
    - FSDP2 (`fully_shard`) gathers parameters once for describe and once for replay, and reduces in
      the last micro-batch; with `reshard="pass"` it gathers, frees and reduces each unit in each
      micro-batch;
    - a network that nothing wraps has the gradient of this rank's images, times the number of
      ranks, so that their mean over ranks is the whole; with `reduce=True` it is summed here.

    The parameters of a loss that has some, such as `proxy_nca`, are parameters of this module: give
    `multistage.learned.parameters()` to the optimiser. They get their whole gradient on every rank.
    With `shard_classes` each rank holds those of its part of the classes, and their gradient, as
    DTensors, which DistributedDataParallel around this module leaves alone.
    To go on bit for bit, save this module's state and torch's random state.

    Args:
        network: takes images as the call gives them, with fewer rows, and returns descriptors (n,
            C).
        loss: a name, "package.module:Class", a Loss, or a function (descriptors, labels) -> scalar,
            such as a loss of pytorch-metric-learning; see also `distap.loss`.
        micro_batch: images that the network takes at once; or MicroBatchSizes, which can also keep
            graphs, or describe more images at once than it replays.
        normalise: scale descriptors to length 1. Without it, a listwise loss refuses other lengths.
        freeze_batchnorm: run BatchNorm layers in evaluation mode here, whatever mode the network is
            in.
        group: the ranks of a batch; None takes those of the wrapper, or all.
        mode: `sharded`, each rank ranks its own queries; `central`, rank 0 ranks all.
        memory: number of earlier descriptors to rank against as well; part of this module's state.
        memory_bytes: bytes for ranking; None takes 1 GiB, or a quarter of a GPU's free memory.
        max_drift: greatest tolerated difference between the two descriptors of an image; None takes
            1e-4, or 1e-3 on a GPU with TF32, or 0.1 under autocast.
        skip_below: do not replay images whose gradient is no longer than this times the longest.
        reduce: sum gradients over the ranks here, for a network that nothing wraps.
        reshard: `step` or `pass`: whether units of `fully_shard` stay gathered between
            micro-batches. `pass` takes least memory and most messages, and keeps no graphs.
        shard_classes: let each rank hold the proxies of its part of the classes alone. The network
            is on its device, and wrapped, before.
        output: name or number of the descriptors in what the network returns, if it is a dict, a
            tuple, or a ModelOutput of transformers.
        pooling: cls, cls_mean, mean or max, if that is tokens (n, t, C) or maps (n, C, h, w). All
            tokens count for mean and max, the first one is that of the class.
        options: options of the loss, or `preset`.
    Raises:
        DistapError: the loss, an option or the mode is unknown, or does not fit shard_classes.
    """

    @checked
    def __init__(
        self,
        network: nn.Module,
        loss: AnyLoss = "ap_q",
        micro_batch: StrictInt | MicroBatchSizes = 16,
        *,
        normalise: bool = True,
        freeze_batchnorm: bool = False,
        group: dist.ProcessGroup | None = None,
        mode: str = "sharded",
        memory: NonNegativeInt = 0,
        memory_bytes: PositiveInt | None = None,
        max_drift: NonNegativeFloat | None = None,
        skip_below: NonNegativeFloat = 0.0,
        reduce: bool = False,
        reshard: Literal["step", "pass"] = "step",
        shard_classes: bool = False,
        output: str | StrictInt | None = None,
        pooling: Literal["cls", "cls_mean", "mean", "max"] | None = None,
        **options: Any,
    ) -> None:
        sharded_over = world_of(network, group) if shard_classes else None
        super().__init__(loss, group, mode, memory, memory_bytes, sharded_over, **options)
        # DistributedDataParallel reads this name. It would send rank 0's part to all ranks.
        self._ddp_params_and_buffers_to_ignore = [
            name for name, parameter in self.named_parameters() if isinstance(parameter, DTensor)
        ]
        self.network = network
        if not isinstance(micro_batch, MicroBatchSizes):
            micro_batch = MicroBatchSizes(micro_batch)
        self.sizes = micro_batch
        self.normalise = normalise
        self.freeze_batchnorm = freeze_batchnorm
        self.reduce = reduce
        self.reshard = reshard
        self.output = output
        self.pool = None if pooling is None else partial(pooled, NAMED[pooling]())
        self.max_drift = max_drift
        self.skip_below = skip_below
        self.ranking: Ranking | None = None  # of the last call: loss by query, numbers of queries
        # rows of the last call whose descriptor was not finite, and was left out
        self.not_finite: list[int] = []
        self.replay_drift = float("nan")  # of the last backward pass
        self._reduces = True  # False inside `no_sync`
        # Modes of the network (whether `network.training`) in which the stages have tried it out.
        self._probed = set[bool]()

    def forward(
        self,
        images: Any,
        labels: Tensor | ArrayLike | None = None,
        samples: Sequence[int] | None = None,
        extra: Mapping[str, Tensor | ArrayLike] | None = None,
    ) -> Tensor:
        """Return the loss of the batch: a scalar, the same on every rank, to differentiate once.

        The first call also tries the network out, with two or three images at a time, which hooks
        see.

        Args:
            images: of this rank: a tensor (b, ...); a list of tensors (C, H, W) of any sizes,
                described one by one unless all are alike; a dict or other nesting of tensors (b,
                ...); or an iterator of micro-batches, each (images, labels), or images alone next
                to `labels`. They stay where they are, such as in the host's memory, and each
                micro-batch is brought to the network's device.
            labels: (b,) integers from 0, or (b, L) from the finest level to the coarsest.
            samples: (b,) numbers by which the memory knows images again.
            extra: further tensors of the images, (b, ...), such as descriptors of a teacher, by the
                names of the parameters by which the loss takes them; see `distap.rank`.
        Raises:
            DistapError: on every rank, for images or labels of wrong shape, BatchNorm in training
                mode, or a batch that cannot be ranked.
        """
        wrapper = self.network
        network = wrapper.module if isinstance(wrapper, DistributedDataParallel) else wrapper
        batch = self._batch(network, images, labels, samples, extra)
        if network is wrapper:
            return self._loss(network, batch)
        # All stages run inside a forward pass of DDP, which then awaits the gradients of its
        # parameters. They come from KnownGradient, once, whatever the number of micro-batches.
        wrapper.module = ReplacedForward(network, lambda _: self._loss(network, batch))
        try:
            return wrapper(torch.zeros(()))
        finally:
            wrapper.module = network

    @uncompiled
    def _loss(self, network: nn.Module, batch: GivenBatch) -> Tensor:
        """Run stages one and two, and leave stage three to autograd.

            forward     describe -> gather -> rank -> value of the loss
            backward    replay -> gradients of `replica.inputs` and `loss.parameters`, in this order

        `replica.inputs` are the trained parameters, or a stand-in if FSDP2 fills their `.grad`.
        """
        trained = {
            name: parameter
            for name, parameter in network.named_parameters()
            if parameter.requires_grad
        }
        # Without `freeze_batchnorm` this changes nothing: `refuse_unusable` has let no BatchNorm
        # layer in training mode through.
        with evaluating(network, _BatchNorm):
            replica, stages = self._stages(network, batch, list(trained.values()))
            described = stages.describe(batch)
        if torch.is_grad_enabled() and stages.probed:
            self._probed.add(network.training)
        gathered = stages.gather(described, batch)
        self._note_not_finite(described)
        if self.normalise or not isinstance(self.loss, DescriptorLoss):
            refuse_lengths(gathered)
        ranking = self.ranking = stages.rank(described.gathering, gathered, batch.step)
        self.warn_if_alike(ranking)
        value = ranking.loss.to(described.descriptors.dtype)
        if not (torch.is_grad_enabled() and (trained or self.loss.parameters)):
            return value

        # `upstream` is dL/d value, such as a loss scale or one part of an accumulation.
        def replay(upstream: Tensor) -> Sequence[Tensor | None]:
            if trained:
                # FSDP2 itself exchanges whole parameters for shards, also in passes of the caller's
                # own.
                if not isinstance(network, FSDPModule):
                    refuse_exchanged(network, trained)
                # DistributedDataParallel, FSDP and Horovod average over the W ranks, so each gives
                # them W times its gradient.
                factor = 1.0 if self._sums_gradients(batch.world) else float(batch.world.size)
                gradient = ranking.gradient * (upstream * factor)
                # Autograd runs a Function's backward without building a graph, but replay needs
                # one.
                with torch.enable_grad(), evaluating(network, _BatchNorm):
                    self.replay_drift, _, _ = stages.replay(batch, described, gradient)
            by_parameters = [gradient * upstream for gradient in ranking.by_parameters]
            return *replica.gradients, *by_parameters

        # True, only once: a second replay would add to the gradients of the first.
        return KnownGradient.apply(value, replay, True, *replica.inputs, *self.loss.parameters)

    def _sums_gradients(self, world: World) -> bool:
        """Return whether replay sums gradients over ranks, rather than a wrapper or the caller."""
        is_wrapped = isinstance(self.network, DistributedDataParallel | FSDPModule)
        return self.reduce and not is_wrapped and world.size > 1

    def _stages(
        self, network: nn.Module, batch: GivenBatch, trained: list[Tensor]
    ) -> tuple[FSDPReplica | CallersReplica, ThreeStages]:
        world = batch.world
        forward = Outputs(network, world, self.normalise, self.output, self.pool)
        replica: FSDPReplica | CallersReplica
        if isinstance(network, FSDPModule):
            replica = FSDPReplica(
                network,
                world,
                forward,
                frees=True,
                syncs=self._reduces,
                reshard=self.reshard,
            )
        elif self.reshard == "pass":
            raise DistapError(
                "network.not_sharded",
                f"reshard is pass, but {type(network).__name__} is not sharded: call fully_shard on"
                " its blocks and on the whole network, or leave reshard out",
            )
        else:
            replica = CallersReplica(
                network, world, forward, trained=trained, sums=self._sums_gradients(world)
            )
        return replica, ThreeStages(
            replica,
            self.loss,
            world,
            seed=batch.seed,
            sizes=self.sizes if batch.is_alike else MicroBatchSizes(1),
            mode=self.mode,
            memory_bytes=self.memory_bytes,
            # A loss on validation images must neither fill the training's memory nor be ranked
            # against it.
            memory=self.memory if self.training else CrossBatchMemory(0),
            max_drift=forward.default_drift if self.max_drift is None else self.max_drift,
            skip_below=self.skip_below,
            probed=network.training in self._probed,
        )

    def _note_not_finite(self, described: Described) -> None:
        self.not_finite = described.lost
        if self.not_finite:
            logger.warning(
                "%d of this rank's %d descriptors are not finite, and their images left out, such"
                " as rows %s",
                len(self.not_finite),
                len(described.descriptors),
                self.not_finite[:10],
            )

    if TYPE_CHECKING:  # nn.Module's own takes and returns anything
        __call__ = forward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank: backward passes of losses made inside do not reduce them.

        The next backward pass of a loss computed outside reduces them together with its own. With
        `reduce=True` every backward pass sums its own gradients, inside as well: what lay in
        `.grad` before could not be told from what other ranks have added to it.
        """
        before = self._reduces
        self._reduces = False
        try:
            with (
                self.network.no_sync()
                if isinstance(self.network, DistributedDataParallel)
                else nullcontext()
            ):
                yield
        finally:
            self._reduces = before

    def extra_repr(self) -> str:
        return f"loss={self.loss!r}, sizes={self.sizes!r}"

    @uncompiled
    def _batch(
        self,
        network: nn.Module,
        images: Any,
        labels: TensorLike | None,
        samples: Sequence[int] | None,
        extra: Extra | None,
    ) -> GivenBatch:
        """Check the images of all ranks, and cut this rank's along rows."""
        world = world_of(self.network, self.group)
        with agreement(world) as view:
            refuse_default_device()
            pieces, labels = cut_along_rows(images, labels)
            refuse_graphs(pieces)
            inputs = Inputs(labels, samples, extra)
            count = sum(map(rows_of, pieces))
            inputs.check(count, self.loss)
            if not count:
                raise DistapError("data.no_images", "no images were given")
            refuse_unusable(network, self.freeze_batchnorm)
            view.kind = inputs.kind(self.loss)
            # Torch's random state gives the seed of dropout, so `torch.manual_seed` repeats a run;
            # all ranks take the seed of rank 0.
            view.value = [count, are_alike(pieces), int(torch.randint(2**62, (), device=CPU))]
        counts, are_all_alike, seeds = zip(*view.values, strict=True)
        self._calls += 1
        # All ranks cut as many micro-batches, since FSDP gathers parameters in each: a shorter
        # share is padded to the longest, and if one rank's images differ in size, all ranks
        # describe theirs one by one.
        return GivenBatch(
            pieces,
            inputs,
            share=max(counts),
            world=world,
            step=self._calls - 1,
            seed=seeds[0],
            is_alike=all(are_all_alike),
        )
