"""The losses as a PyTorch module, for a training loop of one's own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize

from distap.ranking.loss import AnyLoss, build_loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rank import rank


class ListwiseLoss(nn.Module):
    """A listwise loss of a batch: `loss(embeddings, labels)` is a scalar to call `backward` on.

    Value and gradient are computed together, in memory linear in the batch, in float32 at least whatever autocast
    says; `backward` only multiplies. With a process group the batch is that of all ranks, and the gradient that of
    their common loss: sum it over ranks. DistributedDataParallel averages, so there multiply the loss by the number
    of ranks.

    Args:
        loss, weights, group, mode, memory_bytes: arguments of `distap.ranking.rank.rank`.
        memory: number of earlier descriptors to rank against as well; part of the module's state.
        options: of the loss, or `preset`.
    Raises:
        DistapError: the loss or an option is unknown.
    """

    def __init__(
        self,
        loss: AnyLoss = "ap_q",
        weights: str = "uniform",
        group: dist.ProcessGroup | None = None,
        mode: str = "sharded",
        memory: int = 0,
        memory_bytes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.loss = build_loss(loss, weights, **options)
        self.group, self.mode, self.memory_bytes = group, mode, memory_bytes
        self.memory = CrossBatchMemory(memory)

    def forward(self, embeddings: Tensor, labels: Tensor, images: Tensor | None = None) -> Tensor:
        """The loss of the batch, a scalar.

        Args:
            embeddings: (b, C) of this rank, of any length; they are normalised here.
            labels: (b,) integers from 0.
            images: (b,) numbers by which the memory knows images again.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            wide = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
            return _RankingFunction.apply(normalize(wide), labels, images, self)

    def extra_repr(self) -> str:
        return repr(self.loss)

    def get_extra_state(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)


class _RankingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, descriptors: Tensor, labels: Tensor, images: Tensor | None, module: ListwiseLoss) -> Tensor:
        memory = module.memory if module.memory.size and module.training else None
        ranking = rank(
            descriptors,
            labels,
            module.loss,
            group=module.group,
            mode=module.mode,
            memory=memory,
            images=images,
            memory_bytes=module.memory_bytes,
        )
        ctx.save_for_backward(ranking.gradient)
        return ranking.loss.to(descriptors.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():  # as it is under create_graph=True
            raise RuntimeError("listwise losses are differentiable once: their second derivative is not known")
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None
