"""The losses as a PyTorch module, for one's own training loop."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from distap.errors import CAUSES, COLLAPSED, logger
from distap.ranking.compiling import uncompiled
from distap.ranking.losses.building import AnyLoss, build_loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import Ranking, check_mode, rank, shard_classes
from distap.world import CPU, World

Gradients = Callable[[Tensor], Sequence[Tensor | None]]


class RankingModule(nn.Module):
    """A module with a loss, whose memory of earlier descriptors is part of its state."""

    def __init__(
        self,
        loss: AnyLoss = "ap_q",
        group: dist.ProcessGroup | None = None,
        mode: str = "sharded",
        memory: int = 0,
        memory_bytes: int | None = None,
        sharded_over: World | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.loss = build_loss(loss, **options)
        self.group = group
        self.mode = check_mode(mode)
        if sharded_over is not None:
            shard_classes(self.loss, sharded_over, self.mode)
        self.learned = self.loss.learned
        self.memory_bytes = memory_bytes
        self.memory = CrossBatchMemory(memory)
        self.memory.refuse_unfit(self.loss, may_ignore=True)
        self._calls = 0
        self._is_warned = False

    def warn_if_alike(self, ranking: Ranking) -> None:
        """Warn, once until it has changed, that all descriptors of a batch are alike."""
        is_alike = ranking.spread < COLLAPSED
        if is_alike and not self._is_warned:
            logger.warning(
                "the network has given all images of this batch the same descriptor (spread %.1g),"
                " from which no ranking can be learnt. Usual causes: %s",
                ranking.spread,
                CAUSES,
            )
        self._is_warned = is_alike

    def get_extra_state(self) -> Tensor:
        # As a tensor, since safetensors, Accelerate and Hugging Face save nothing else.
        # by which dropout and simix draw
        state = {**self.memory.state_dict(), "calls": torch.tensor(self._calls)}
        return torch.frombuffer(bytearray(save(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        saved = load(state.cpu().numpy().tobytes())
        self._calls = int(saved.pop("calls", 0))
        self.memory.load_state_dict(saved)


class ListwiseLoss(RankingModule):
    """A listwise loss of a batch: `loss(embeddings, labels)` returns a scalar to differentiate.

    Value and gradient are computed together, in memory linear in the batch, in float32 at least
    whatever autocast says; `backward` only multiplies. With a process group the batch is that of
    all ranks, and the gradient that of their common loss: sum it over ranks.
    DistributedDataParallel averages, so there multiply the loss by the number of ranks.

    The parameters of a loss that has some, such as `proxy_nca`, are those of this module: give them
    to the optimiser. Over ranks they get the same share of their gradient on each, and so behave
    like the network's. With `shard_classes` each rank holds its part of them, with its whole
    gradient.

    Args:
        memory: number of earlier descriptors to rank against as well; part of the module's state.
        shard_classes: let each rank of `group` hold the proxies of its part of the classes alone,
            as a DTensor.
        options: options of the loss, or `preset`; see `distap.rank` for the other arguments.
    Raises:
        DistapError: the loss, an option or the mode is unknown, or does not fit shard_classes.
    """

    def __init__(
        self,
        loss: AnyLoss = "ap_q",
        group: dist.ProcessGroup | None = None,
        mode: str = "sharded",
        memory: int = 0,
        memory_bytes: int | None = None,
        shard_classes: bool = False,
        **options: Any,
    ) -> None:
        sharded_over = None
        if shard_classes:
            uses_gpu = group is not None and dist.get_backend(group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else CPU
            sharded_over = World.of_group(group, device)
        super().__init__(loss, group, mode, memory, memory_bytes, sharded_over, **options)

    @uncompiled
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | ArrayLike,
        samples: Tensor | ArrayLike | None = None,
        extra: Mapping[str, Tensor | ArrayLike] | None = None,
        images: Tensor | ArrayLike | None = None,
    ) -> Tensor:
        """Return the loss of the batch, a scalar.

        Args:
            embeddings: (b, C) of this rank, of any length; they are normalised here.
            labels: (b,) integers from 0, or (b, L) from the finest level to the coarsest.
            samples: (b,) numbers by which the memory knows images again.
            extra: see `distap.rank`.
            images: the old name of `samples`.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            descriptors = normalize(
                embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
            )
            ranking = rank(
                descriptors.detach(),
                labels,
                self.loss,
                group=self.group,
                mode=self.mode,
                memory=self.memory if self.memory.size and self.training else None,
                samples=samples,
                memory_bytes=self.memory_bytes,
                step=self._calls,
                extra=extra,
                images=images,
            )
            self._calls += 1
            self.warn_if_alike(ranking)
            value = ranking.loss.to(descriptors.dtype)
            # Descriptors have this rank's gradient; the loss's parameters have all ranks', and each
            # takes a share of those that it holds whole.
            ranks = 1 if self.group is None else dist.get_world_size(self.group)

            def gradients(upstream: Tensor) -> Sequence[Tensor]:
                by_parameters = [
                    whole * (upstream if isinstance(whole, DTensor) else upstream / ranks)
                    for whole in ranking.by_parameters
                ]
                return [ranking.gradient * upstream, *by_parameters]

            return KnownGradient.apply(value, gradients, False, descriptors, *self.loss.parameters)

    if TYPE_CHECKING:  # nn.Module's own takes and returns anything
        __call__ = forward

    def extra_repr(self) -> str:
        return repr(self.loss)


class KnownGradient(torch.autograd.Function):
    """Return a loss to autograd with gradients computed before.

    `only_once` refuses a second backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Gradients, only_once: bool, *_: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.only_once = only_once
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as it is under create_graph=True
            raise RuntimeError(
                "listwise losses are differentiable once: their second derivative is not known"
            )
        if ctx.gradients is None:
            raise RuntimeError("this loss was sent back already; call multistage again")
        gradients = ctx.gradients
        # The closure holds pixels and graphs of a whole batch; they are free as soon as it has run.
        if ctx.only_once:
            ctx.gradients = None
        return None, None, None, *gradients(upstream[0])
