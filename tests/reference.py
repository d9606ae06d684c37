"""What distap computes fast, written slowly and obviously from the papers: the tests compare against these."""

import torch
from torch import Tensor


def quantized_ap_loss(
    descriptors: Tensor,
    labels: Tensor,
    bins: int = 20,
    low: float = -1.0,
    high: float = 1.0,
    self_pair: bool = True,
    weights: str = "uniform",
) -> Tensor:
    """1 - AP_Q through the whole B x M x B tensor of soft bin assignments (Revaud et al. 2019, eq. 7 to 12)."""
    similarities = (descriptors @ descriptors.t()).clamp(low, high)
    width = (high - low) / (bins - 1)
    centres = high - width * torch.arange(bins, dtype=similarities.dtype)
    soft = (1 - (similarities[:, None] - centres[None, :, None]).abs() / width).clamp(min=0)
    counts = torch.ones_like(similarities)
    if not self_pair:
        counts = counts - torch.eye(len(labels), dtype=counts.dtype)
    positive = (labels[:, None] == labels[None]) * counts
    in_bin = (soft * counts[:, None]).sum(-1)
    positives_in_bin = (soft * positive[:, None]).sum(-1)
    seen, positives_seen = in_bin.cumsum(1), positives_in_bin.cumsum(1)
    precision = positives_seen / torch.where(seen > 0, seen, 1)
    average = (precision * positives_in_bin).sum(1) / positive.sum(1).clamp(min=1)
    total, kept, classes = average.new_zeros(()), 0.0, labels.tolist()
    for query, label in enumerate(classes):
        if classes.count(label) > 1:
            weight = 1.0 if weights == "uniform" else 1.0 / classes.count(label)
            total = total + weight * (1 - average[query])
            kept += weight
    return total / kept


def quantized_ap_gradient(raw: Tensor, labels: Tensor, **settings: object) -> tuple[float, Tensor]:
    """Loss and gradient by `raw`, whose rows are normalised first: on them the gradient is well defined."""
    raw = raw.detach().clone().requires_grad_()
    loss = quantized_ap_loss(torch.nn.functional.normalize(raw), labels, **settings)  # type: ignore[arg-type]
    loss.backward()
    assert raw.grad is not None
    return loss.item(), raw.grad


def through_normalisation(raw: Tensor, gradient: Tensor) -> Tensor:
    """The gradient by `raw` that a gradient by its normalised rows leads to."""
    raw = raw.detach().clone().requires_grad_()
    torch.nn.functional.normalize(raw).backward(gradient)
    assert raw.grad is not None
    return raw.grad


def labelled_set_figures(similarities: list[list[float]], labels: list[int]) -> dict[str, float]:
    """mAP, mAP@R and R@k by sorting each query's gallery; a positive comes after negatives it ties with."""
    precisions, at_r, firsts = [], [], []
    for query, label in enumerate(labels):
        gallery = [other for other in range(len(labels)) if other != query]
        gallery.sort(key=lambda other: (-similarities[query][other], labels[other] == label))
        right = [labels[other] == label for other in gallery]
        count = sum(right)
        if count == 0:
            continue
        hits = [(place, sum(right[:place])) for place in range(1, len(right) + 1) if right[place - 1]]
        precisions.append(sum(found / place for place, found in hits) / count)
        at_r.append(sum(found / place for place, found in hits if place <= count) / count)
        firsts.append(hits[0][0])
    queries = len(firsts)
    return {
        "mAP": sum(precisions) / queries,
        "mAP@R": sum(at_r) / queries,
        **{f"R@{k}": sum(first <= k for first in firsts) / queries for k in (1, 5, 10)},
    }
