"""The losses as published code computes them: every pair, or triple, of the batch at once, and
autograd.

What the streamed forms are measured against. No memory, no ranks, uniform weights.
"""

import torch
from torch import Tensor

from distap.errors import DistapError
from distap.ranking.histogram.passes import HistogramLoss
from distap.ranking.loss import Loss
from distap.ranking.losses.blackbox import BlackBoxAP
from distap.ranking.losses.calibration import Calibration, Roadmap
from distap.ranking.losses.smooth import RecallAtK, SmoothAP, SupAP

IMAGES_A_CLASS = 8
VALUES_KEPT = 5  # tensors of full size that autograd keeps or makes at once, about


def materialised_bytes(
    loss: Loss, batch: int, itemsize: int = 4, recall_queries: int | None = None
) -> int | None:
    """About what `materialised_loss` and its backward take.

    None if the loss has no materialised form here.

    RS@k may take its queries one by one (`released_recall_gradient`): `recall_queries` of them at
    once.
    """
    if isinstance(loss, RecallAtK):
        return VALUES_KEPT * itemsize * batch * (recall_queries or batch) * IMAGES_A_CLASS
    if not isinstance(loss, HistogramLoss | SmoothAP | Calibration | BlackBoxAP):
        return None
    depth = 1
    if isinstance(loss, HistogramLoss):
        depth = loss.centres
    if isinstance(loss, SmoothAP):
        depth = batch
    return VALUES_KEPT * itemsize * batch * batch * depth


def materialised_loss(loss: Loss, descriptors: Tensor, labels: Tensor) -> Tensor:
    """The mean over queries, differentiable.

    Args:
        loss: one of the losses that rank a batch by query.
        descriptors: (B, C) of length 1.
        labels: (B,) each class twice at least.
    """
    similarities = descriptors @ descriptors.t()
    same_class = labels[:, None] == labels[None]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    if isinstance(loss, HistogramLoss):
        return _soft_binned(loss, similarities, same_class, itself)
    if isinstance(loss, Roadmap):
        ranking = _pairwise(loss, similarities, same_class, itself)
        scores = _calibration(
            Calibration(alpha=loss.alpha, beta=loss.beta), similarities, same_class, itself
        )
        return (1 - loss.lam) * ranking + loss.lam * scores
    if isinstance(loss, SmoothAP):
        return _pairwise(loss, similarities, same_class, itself)
    if isinstance(loss, Calibration):
        return _calibration(loss, similarities, same_class, itself)
    if isinstance(loss, BlackBoxAP):
        return _blackbox(loss, similarities, same_class, itself)
    if isinstance(loss, RecallAtK):
        return torch.stack(
            [_recall(loss, descriptors, labels, query) for query in range(len(labels))]
        ).mean()
    raise DistapError(
        "loss.not_materialised", f"{type(loss).__name__} has no materialised form here"
    )


def released_recall_gradient(loss: RecallAtK, descriptors: Tensor, labels: Tensor) -> Tensor:
    """The gradient of RS@k in the least memory: a forward and a backward pass for each query."""
    leaf = descriptors.detach().requires_grad_()
    for query in range(len(labels)):
        (_recall(loss, leaf, labels, query) / len(labels)).backward()
    assert leaf.grad is not None
    return leaf.grad


def _recall(loss: RecallAtK, descriptors: Tensor, labels: Tensor, query: int) -> Tensor:
    """The loss of one query, as the authors compute it."""
    positives = (labels == labels[query]).nonzero().flatten()
    positives = positives[positives != query]
    similarities = descriptors @ descriptors[query]
    before = torch.sigmoid((similarities - similarities[positives, None]) / loss.tau)
    ranks = 1 + before.sum(1) - 0.5  # an image counts itself by half
    hits = [
        torch.sigmoid((k - ranks) / loss.hit_tau).sum().clamp(max=k) / min(k, len(positives))
        for k in loss.ks
    ]
    return 1 - torch.stack(hits).mean()


def _soft_binned(
    loss: HistogramLoss, similarities: Tensor, same_class: Tensor, itself: Tensor
) -> Tensor:
    places = torch.arange(loss.centres, dtype=similarities.dtype, device=similarities.device)
    centres = loss.high - loss.width * places
    inside = similarities.clamp(loss.low, loss.high)
    soft = (1 - (inside[:, None] - centres[None, :, None]).abs() / loss.width).clamp(min=0)
    counted = same_class if loss.self_pair else same_class & ~itself
    positives = (soft * counted[:, None]).sum(-1).cumsum(1)
    negatives = (soft * ~same_class[:, None]).sum(-1).cumsum(1)
    return 1 - loss.average_precision(negatives, positives).mean()


def _pairwise(loss: SmoothAP, similarities: Tensor, same_class: Tensor, itself: Tensor) -> Tensor:
    counted = same_class if loss.self_pair else same_class & ~itself
    t = similarities[:, None, :] - similarities[:, :, None]  # of query i: s_j - s_k at [i, k, j]
    step = torch.sigmoid(t / loss.tau)
    of_positives = step
    if isinstance(loss, SupAP):
        _, rho, delta, offset, start = loss.step_numbers()
        of_positives = (t >= 0).to(t.dtype)
        step = torch.where(t > delta, rho * t + offset, step + start * (t > 0))
    rank = 1 + (of_positives * (counted[:, None, :] & ~itself[None])).sum(-1)
    before = (step * ~same_class[:, None, :]).sum(-1)
    precision = (rank / (rank + before) * counted).sum(1) / counted.sum(1)
    return 1 - precision.mean()


def _calibration(
    loss: Calibration, similarities: Tensor, same_class: Tensor, itself: Tensor
) -> Tensor:
    counted = same_class if loss.self_pair else same_class & ~itself
    pull = (loss.alpha - similarities).clamp(min=0) * counted
    push = (similarities - loss.beta).clamp(min=0) * ~same_class
    return (pull.sum(1) / counted.sum(1) + push.sum(1) / (~same_class).sum(1)).mean()


def _blackbox(loss: BlackBoxAP, similarities: Tensor, same_class: Tensor, itself: Tensor) -> Tensor:
    batch = len(similarities)
    others = ~itself
    scores = (similarities + loss.margin * (0.5 - same_class.to(similarities.dtype)))[others].view(
        batch, -1
    )
    counted = same_class[others].view(batch, -1)
    ranks: Tensor = _BlackBoxRanks.apply(scores, loss.lam)
    among = _ranks(counted.to(ranks.dtype) * 2 - ranks.detach())
    return 1 - (among / ranks * counted).sum(1).div(counted.sum(1)).mean()


class _BlackBoxRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, lam):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(scores)
        ctx.lam = lam
        return _ranks(scores)

    @staticmethod
    def backward(ctx, *upstream):  # type: ignore[no-untyped-def]
        (scores,) = ctx.saved_tensors
        return (_ranks(scores + ctx.lam * upstream[0]) - _ranks(scores)) / ctx.lam, None


def _ranks(scores: Tensor) -> Tensor:
    """Ranks over their number, 1 / n for the greatest."""
    places = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (1 + places).to(scores.dtype) / scores.shape[1]
