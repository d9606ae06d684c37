"""What distap computes fast, written slowly and obviously from the papers: the tests compare
against these.
"""

from collections.abc import Callable
from typing import Any

import torch
from newer_losses import OF_QUERY, step
from torch import Tensor


def listwise_loss(
    name: str,
    descriptors: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    weights: str | Tensor = "uniform",
    self_pair: bool | None = None,
    images: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """A loss of each query, query by query; `gallery` is what is ranked besides the batch itself.

    With `images`, the queries rank these of another network, (B, C), in place of the batch. A query
    needs a positive, but for `sigmoid`.
    """
    if name == "roadmap":
        return _roadmap(
            descriptors, labels, gallery, gallery_labels, weights, self_pair, images, **settings
        )
    if self_pair is None:
        self_pair = name in ("ap_q", "ap_t", "smooth_ap", "sup_ap")
    batch = labels.tolist()
    everything = batch + ([] if gallery_labels is None else gallery_labels.tolist())
    images = descriptors if images is None else images
    images = images if gallery is None else torch.cat([images, gallery])
    similarities = descriptors @ images.t()
    queries = []
    weight = []
    for query, label in enumerate(batch):
        positives = [j for j, other in enumerate(everything) if other == label and j != query]
        negatives = [j for j, other in enumerate(everything) if other != label]
        if positives or name == "sigmoid":
            counted = [query, *positives] if self_pair else positives
            queries.append(
                (similarities[query], query, positives, negatives)
                if name in OF_QUERY
                else (similarities[query, counted], similarities[query, negatives])
            )
            of_query = weights[query] if isinstance(weights, Tensor) else 1.0
            weight.append(1.0 / batch.count(label) if weights == "class" else of_query)
    if settings.get("form") == "violating":
        return _violating_calibration(queries, weight, **settings)
    losses = [(OF_QUERY | LOSS_OF_QUERY)[name](*query, **settings) for query in queries]
    return sum(w * loss for w, loss in zip(weight, losses, strict=True)) / sum(weight)  # type: ignore[return-value]


def _roadmap(*batch: Any, lam: float = 0.5, **settings: Any) -> Tensor:
    """Ramzi et al. 2021, eq. 8; in calibration a query is no positive of its own."""
    of_scores = {key: settings.pop(key) for key in ("alpha", "beta", "form") if key in settings}
    *rows, self_pair, images = batch
    ranking = listwise_loss("sup_ap", *rows, self_pair, images, **settings)
    scores = listwise_loss("calibration", *rows, False, images, **of_scores)
    return (1 - lam) * ranking + lam * scores


def _violating_calibration(
    queries: list[tuple[Tensor, Tensor]],
    weight: list[float],
    alpha: float = 0.9,
    beta: float = 0.6,
    form: str = "",
) -> Tensor:
    """The mean over the batch's positives below alpha, plus that over its negatives above beta."""
    total = 0 * queries[0][0].sum()  # part of the graph where no pair is
    for side, sign, edge in ((0, -1, alpha), (1, 1, beta)):
        distance = 0 * total
        pairs = 0.0
        for query, w in zip(queries, weight, strict=True):
            beyond = sign * (query[side] - edge)
            distance = distance + w * beyond[beyond > 0].sum()
            pairs += w * int((beyond > 0).sum())
        if pairs:
            total = total + distance / pairs
    return total


def listwise_gradient(
    name: str, raw: Tensor, labels: Tensor, *gallery: Tensor, **settings: Any
) -> tuple[float, Tensor]:
    """Loss and gradient by `raw`, whose rows are normalised first: on them the gradient is well
    defined.
    """
    raw = raw.detach().clone().requires_grad_()
    loss = listwise_loss(name, torch.nn.functional.normalize(raw), labels, *gallery, **settings)
    loss.backward()
    assert raw.grad is not None
    return loss.item(), raw.grad


def soft_histograms(
    positives: Tensor, negatives: Tensor, bins: int, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Soft number of positives, and of all images, in each bin (Revaud et al. 2019, eq. 7 to 9)."""
    width = (high - low) / (bins - 1)
    centres = high - width * torch.arange(bins, dtype=positives.dtype)
    histograms = []
    for similarities in (positives, torch.cat([positives, negatives])):
        inside = similarities.clamp(low, high)
        histograms.append((1 - (inside[None] - centres[:, None]).abs() / width).clamp(min=0).sum(1))
    return histograms[0], histograms[1]


def ap_q(
    positives: Tensor, negatives: Tensor, bins: int = 20, low: float = -1.0, high: float = 1.0
) -> Tensor:
    """Revaud et al. 2019, eq. 10 to 12."""
    right, everything = soft_histograms(positives, negatives, bins, low, high)
    seen = everything.cumsum(0)
    precision = right.cumsum(0) / torch.where(seen > 0, seen, 1)
    return 1 - (precision * right).sum() / right.sum()


def ap_t(
    positives: Tensor,
    negatives: Tensor,
    bins: int = 20,
    low: float = -1.0,
    high: float = 1.0,
    form: str = "simplified",
) -> Tensor:
    """Revaud et al. 2019, eq. 13, or the integral of He et al. 2018, with the bounds of the
    published code.
    """
    right, everything = soft_histograms(positives, negatives, bins, low, high)
    total = right.new_zeros(())
    right_before = right.new_zeros(())
    before = right.new_zeros(())
    for r, n in zip(right, everything, strict=True):
        if form == "simplified":
            total = total + r * (2 * right_before + r + 1) / (2 * before + n + 1)
        else:
            ratio = (r - 1).clamp(min=0) / ((n - 1).clamp(min=0) + 1e-8)
            growth = torch.log((before + n + 1) / (before + 1))
            inside = n * ratio + (right_before + 1 - ratio * (before + 1)) * growth
            total = total + r * inside / (n + 1e-8)
        right_before, before = right_before + r, before + n
    return 1 - total / len(positives)


def fast_ap(
    positives: Tensor, negatives: Tensor, bins: int = 10, low: float = -1.0, high: float = 1.0
) -> Tensor:
    """Cakir et al. 2019, eq. 9, from histograms of squared distances."""
    nearest = 2 - 2 * high
    farthest = 2 - 2 * low
    width = (farthest - nearest) / bins
    right = positives.new_zeros(())
    everything = positives.new_zeros(())
    total = positives.new_zeros(())
    for bin_number in range(bins + 1):
        centre = nearest + bin_number * width
        inside = []
        for similarities in (positives, negatives):
            distances = (2 - 2 * similarities).clamp(nearest, farthest)
            inside.append((1 - (distances - centre).abs() / width).clamp(min=0).sum())
        right, everything = right + inside[0], everything + inside[0] + inside[1]
        if everything > 0:
            total = total + inside[0] * right / everything
    return 1 - total / len(positives)


def smooth_ap(positives: Tensor, negatives: Tensor, tau: float = 0.01) -> Tensor:
    """Brown et al. 2020, eq. 5 to 8."""
    precisions = []
    for k, positive in enumerate(positives):
        other_rows = torch.cat([positives[:k], positives[k + 1 :]])
        among_positives = 1 + torch.sigmoid((other_rows - positive) / tau).sum()
        among_all = among_positives + torch.sigmoid((negatives - positive) / tau).sum()
        precisions.append(among_positives / among_all)
    return 1 - torch.stack(precisions).mean()


def sup_ap(
    positives: Tensor,
    negatives: Tensor,
    tau: float = 0.01,
    rho: float = 100.0,
    delta: float | None = None,
    offset: float | None = None,
    start: float = 0.5,
) -> Tensor:
    """Ramzi et al. 2021, eq. 4 and 5."""
    precisions = []
    for k, positive in enumerate(positives):
        other_rows = torch.cat([positives[:k], positives[k + 1 :]])
        among_positives = 1 + (other_rows >= positive).sum()
        before = sum(
            (step(t, tau, rho, delta, offset, start) for t in negatives - positive), 0 * positive
        )
        precisions.append(among_positives / (among_positives + before))
    return 1 - torch.stack(precisions).mean()


def calibration(
    positives: Tensor, negatives: Tensor, alpha: float = 0.9, beta: float = 0.6, form: str = "all"
) -> Tensor:
    """Ramzi et al. 2021, eq. 7; with form `sum`, the contrastive loss of Wang et al. 2020 (XBM)."""
    pull = (alpha - positives).clamp(min=0)
    push = (negatives - beta).clamp(min=0)
    if form == "sum":
        return pull.sum() + push.sum()
    return pull.sum() / max(len(pull), 1) + push.sum() / max(len(push), 1)


class _Ranks(torch.autograd.Function):
    """Ranks over their number; the derivative as Rolínek et al. (2020, algorithm 1) define it."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lam: float) -> Tensor:
        ctx.lam = lam
        ctx.scores = scores
        return _ranks(scores)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return -(_ranks(ctx.scores) - _ranks(ctx.scores + ctx.lam * upstream[0])) / ctx.lam, None


def _ranks(scores: Tensor) -> Tensor:
    before = (scores[None] > scores[:, None]).sum(1)
    return (1 + before).to(scores.dtype) / len(scores)


def blackbox_ap(
    positives: Tensor, negatives: Tensor, lam: float = 4.0, margin: float = 0.02
) -> Tensor:
    """AP of the exact ranking, as Rolínek et al. 2020 differentiate it."""
    scores = torch.cat([positives - margin / 2, negatives + margin / 2])
    ranks: Tensor = _Ranks.apply(scores, lam)  # type: ignore[assignment]
    of_positives = ranks[: len(positives)]
    among_positives = (_ranks(-of_positives.detach()) * len(positives) / len(scores)).detach()
    return 1 - (among_positives / of_positives).mean()


def multi_similarity(
    positives: Tensor,
    negatives: Tensor,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float | None = 0.1,
) -> Tensor:
    """Wang et al. 2019, eq. 8 to 10."""
    hard = [*positives], [*negatives]
    if epsilon is not None:
        hard = (
            [s for s in positives if len(negatives) and s < negatives.max() + epsilon],
            [s for s in negatives if s > positives.min() - epsilon],
        )
    total = 0 * positives.sum()
    for side, factor in zip(hard, (-alpha, beta), strict=True):
        total = total + torch.log1p(
            sum((torch.exp(factor * (s - base)) for s in side), 0 * total)
        ) / abs(factor)
    return total


def distance(similarity: Tensor) -> Tensor:
    return (2 - 2 * similarity).clamp(min=1e-14).sqrt()


def contrastive(
    positives: Tensor, every_negative: Tensor, margin: float = 0.7, negatives: int | None = None
) -> Tensor:
    """Radenović et al. 2018, eq. 4, with means over the query's positives and its negatives within
    the margin.

    With a number of negatives, that of a tuple with so many, in the mean over its positive.
    """
    nearest = every_negative.sort(descending=True).values[:negatives]
    pushed = [(margin - distance(s)) ** 2 / 2 for s in nearest if distance(s) < margin]
    over = 1 if negatives else len(pushed)
    return (2 - 2 * positives).mean() / 2 + (sum(pushed) / over if pushed else 0)


def triplet(
    positives: Tensor,
    negatives: Tensor,
    margin: float | None = 0.1,
    mining: str = "all",
    squared: bool = False,
) -> Tensor:
    """Hermans et al. 2017, eq. 5, and the soft margin below it; Gordo et al. 2017; Schroff et al.
    2015, eq. 4.
    """
    losses = []
    if mining == "all":
        near, far = (
            distance(element) ** (2 if squared else 1) for element in (negatives, positives)
        )
        violations = (far[:, None] - near[None]).flatten()
        if margin is None:
            return (
                torch.log(1 + violations.exp()).mean() if len(violations) else 0 * positives.sum()
            )
        return (violations + margin).clamp(min=0).sum() / max(1, int((violations > -margin).sum()))
    for positive in [positives.amin()] if mining == "hardest" else positives:
        farther = negatives[negatives < positive] if mining == "semi_hard" else negatives
        if not len(farther):
            losses.append(0 * positive)
            continue
        pair = [
            distance(similarity) ** (2 if squared else 1)
            for similarity in (positive, farther.amax())
        ]
        violation = pair[0] - pair[1]
        losses.append(
            torch.log(1 + violation.exp()) if margin is None else (violation + margin).clamp(min=0)
        )
    return torch.stack(losses).mean()


def proxies(
    descriptors: Tensor, labels: Tensor, proxies: Tensor, temperature: float, squared: bool
) -> Tensor:
    """Teh et al. 2020, of squared distances; Zhai and Wu 2019, of similarities."""
    losses = []
    for descriptor, label in zip(descriptors, labels.tolist(), strict=True):
        near = []
        for proxy in proxies:
            direction = proxy / proxy.norm()
            near.append(
                -((descriptor - direction) ** 2).sum() if squared else descriptor @ direction
            )
        exponentials = [(item / temperature).exp() for item in near]
        losses.append(-torch.log(exponentials[label] / torch.stack(exponentials).sum()))
    return torch.stack(losses).mean()


LOSS_OF_QUERY: dict[str, Callable[..., Tensor]] = {
    "ap_q": ap_q,
    "ap_t": ap_t,
    "fast_ap": fast_ap,
    "smooth_ap": smooth_ap,
    "sup_ap": sup_ap,
    "calibration": calibration,
    "blackbox_ap": blackbox_ap,
    "multi_similarity": multi_similarity,
    "contrastive": contrastive,
    "triplet": triplet,
}
