"""Losses since 2021, written slowly and obviously from their definitions, of a query or of whole
batches.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def sigma(t: Tensor, tau: float) -> Tensor:
    return 1 / (1 + torch.exp((-t / tau).clamp(-700, 700)))


def step(
    t: Tensor, tau: float, rho: float, delta: float | None, offset: float | None, start: float
) -> Tensor:
    """SupAP's step, by cases."""
    delta = tau * math.log(99) if delta is None else delta
    offset = 1 / (1 + math.exp(-delta / tau)) + start - rho * delta if offset is None else offset
    if t > delta:
        return rho * t + offset
    return sigma(t, tau) + (start if t > 1e-14 else 0)


def is_before(s: Tensor, than: Tensor) -> bool:
    return bool(s >= than - 1e-14)


def recall_at_k(
    similarities: Tensor,
    query: int,
    same: list[int],
    other: list[int],
    ks: tuple[int, ...] = (1, 2, 4, 8, 16),
    tau: float = 0.01,
    hit_tau: float = 1.0,
    form: str = "paper",
    **bounding: Any,
) -> Tensor:
    scores = -(2 - 2 * similarities).clamp(min=1e-12).sqrt() if form == "oml" else similarities
    positives = [query, *same] if form in ("suprank", "oml") else same
    ranks = []
    for k in positives:
        before = [j for j in (*positives, *other) if j != k] + (
            [query] if form == "released" else []
        )
        rank = torch.full((), 0.5 if form == "oml" else 1.0, dtype=scores.dtype)
        for j in before:
            if not bounding:
                rank = rank + sigma(scores[j] - scores[k], tau)
            elif j in other:
                rank = rank + step(scores[j] - scores[k], tau, **bounding)
            else:
                rank = rank + is_before(scores[j], scores[k])
        ranks.append(rank)
    recalls = []
    for inputs in ks:
        k = (
            min(inputs, len(same) + len(other) + 1)
            if form == "released"
            else inputs + (form == "oml")
        )
        hits = sum(sigma(k - rank, hit_tau) for rank in ranks)
        if form == "released":
            hits = hits.clamp(max=k)
        recalls.append(hits / (len(positives) if form == "paper" else min(k, len(positives))))
    return 1 - sum(recalls) / len(ks)


def pnp(
    similarities: Tensor,
    query: int,
    same: list[int],
    other: list[int],
    tau: float = 0.01,
    form: str = "D_q",
    b: float = 2.0,
    alpha: float = 1.0,
) -> Tensor:
    losses = []
    for k in [query, *same]:
        r = sum((sigma(similarities[j] - similarities[k], tau) for j in other), 0 * similarities[k])
        losses.append(
            {
                "O": r,
                "I_u": (1 + r) * torch.log(1 + r),
                "I_b": (b * r - torch.log(1 + b * r)) / b**2,
                "D_s": torch.log(1 + r),
                "D_q": 1 - 1 / (1 + r) ** alpha,
            }[form]
        )
    return sum(losses) / len(losses)


def sup_con(
    similarities: Tensor, query: int, same: list[int], other: list[int], temperature: float = 0.07
) -> Tensor:
    everything = sum(torch.exp(similarities[j] / temperature) for j in (*same, *other))
    return -sum(
        torch.log(torch.exp(similarities[p] / temperature) / everything) for p in same
    ) / len(same)


def info_nce(
    similarities: Tensor, query: int, same: list[int], other: list[int], temperature: float = 0.07
) -> Tensor:
    negatives = sum(torch.exp(similarities[j] / temperature) for j in other)
    element = [torch.exp(similarities[p] / temperature) for p in same]
    return -sum(torch.log(item / (item + negatives)) for item in element) / len(same)


def sigmoid(
    similarities: Tensor,
    query: int,
    same: list[int],
    other: list[int],
    log_scale: Tensor,
    bias: Tensor,
) -> Tensor:
    pairs = [(1, j) for j in same] + [(-1, j) for j in other]
    return sum(
        torch.log1p(torch.exp(-z * (log_scale.exp() * similarities[j] + bias))) for z, j in pairs
    ) / len(pairs)


OF_QUERY: dict[str, Callable[..., Tensor]] = {
    "recall_at_k": recall_at_k,
    "sup_recall_at_k": partial(recall_at_k, rho=100.0, delta=None, offset=None, start=0.5),
    "pnp": pnp,
    "sup_con": sup_con,
    "info_nce": info_nce,
    "sigmoid": sigmoid,
}


def graded(
    name: str,
    descriptors: Tensor,
    levels: Tensor,
    gallery: Tensor,
    gallery_levels: Tensor,
    weights: str,
    tau: float = 0.01,
    relevance: str = "pop",
    alpha: float = 1.0,
    rho: float = 100.0,
    delta: float | None = None,
    offset: float | None = None,
    start: float = 0.5,
    images: Tensor | None = None,
) -> Tensor:
    """H-AP and NDCG of labels (B, L), the finest first; `images` take the batch's place."""
    everything = torch.cat([descriptors if images is None else images, gallery])
    known_labels = torch.cat([levels, gallery_levels])
    depth = levels.shape[1]
    count = len(known_labels)
    losses = []
    weight = []
    for query in range(len(descriptors)):
        level = [int((known_labels[j] == levels[query]).sum()) for j in range(count)]
        if sum(index > 0 for index in level) < 2:
            continue
        size = [level.count(element) for element in range(depth + 1)]
        rel = [0.0] * (depth + 1)
        for element in range(1, depth + 1):
            if name != "h_ap":
                rel[element] = 2.0**element - 1
            elif relevance == "pop":
                rel[element] = (element / depth) ** alpha / size[element] if size[element] else 0.0
            else:
                rel[element] = rel[element - 1] + 1 / sum(size[element:]) / depth
        scores = descriptors[query] @ everything.t()
        total = torch.zeros((), dtype=torch.float64)
        ideal = 0.0
        for k in range(count):
            if level[k] == 0:
                continue
            rank = torch.ones((), dtype=torch.float64)
            gain = rel[level[k]]
            for j in range(count):
                if j == k:
                    continue
                if name == "smooth_ndcg":
                    rank = rank + sigma(scores[j] - scores[k], tau)
                elif rel[level[j]] >= rel[level[k]]:
                    rank = rank + is_before(scores[j], scores[k])
                else:
                    rank = rank + step(scores[j] - scores[k], tau, rho, delta, offset, start)
                gain += min(rel[level[j]], rel[level[k]]) * is_before(scores[j], scores[k])
            total = total + (
                gain / rank if name == "h_ap" else rel[level[k]] / torch.log2(1 + rank)
            )
        if name == "h_ap":
            ideal = sum(rel[index] for index in level)
        else:
            best = sorted((rel[index] for index in level), reverse=True)
            ideal = sum(gain / math.log2(2 + place) for place, gain in enumerate(best))
        losses.append(1 - total / ideal)
        weight.append(
            1.0 if weights == "uniform" else 1 / levels[:, 0].tolist().count(int(levels[query, 0]))
        )
    return sum(w * index for w, index in zip(weight, losses, strict=True)) / sum(weight)


def proxies_of(name: str, descriptors: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    """ArcFace, CosFace and Proxy Anchor with their defaults."""
    similarities = descriptors @ (proxies / proxies.norm(dim=1, keepdim=True)).t()
    if name == "proxy_anchor":
        pulled = [k for k in range(len(proxies)) if k in labels.tolist()]
        pull = [
            torch.log(1 + torch.exp(-32 * (similarities[labels == k, k] - 0.1)).sum())
            for k in pulled
        ]
        push = [
            torch.log(1 + torch.exp(32 * (row + 0.1)).sum())
            for row in (similarities[labels != k, k] for k in range(len(proxies)))
        ]
        return sum(pull) / len(pull) + sum(push) / len(push)
    losses = []
    for row, label in zip(similarities, labels.tolist(), strict=True):
        logits = 30 * row
        moved = torch.cos(torch.acos(row[label]) + 0.5) if name == "arc_face" else row[label] - 0.35
        remaining = sum(torch.exp(logit) for k, logit in enumerate(logits) if k != label)
        losses.append(-torch.log(torch.exp(30 * moved) / (torch.exp(30 * moved) + remaining)))
    return sum(losses) / len(losses)


MARGINS = (0.1, 0.25, 0.35, 0.45)


def csl(
    descriptors: Tensor, labels: Tensor, proxies: Tensor, levels: Tensor, weights: str
) -> Tensor:
    """CSL with these margins, for the (K, L) numbers of the classes of each proxy."""
    losses = []
    weight = []
    for row, label in zip(
        descriptors @ (proxies / proxies.norm(dim=1, keepdim=True)).t(), labels, strict=True
    ):
        for classes, margin in zip(levels.t(), MARGINS, strict=False):
            remaining = [k for k in range(len(proxies)) if classes[k] != classes[label]]
            losses.append(
                torch.log(
                    1
                    + sum(
                        (torch.exp(32 * (row[k] + margin - row[label])) for k in remaining),
                        0 * row[0],
                    )
                )
            )
            weight.append(1.0 if weights == "uniform" else 1 / labels.tolist().count(label))
    return (
        sum(w * item for w, item in zip(weight, losses, strict=True))
        / sum(weight)
        * levels.shape[1]
    )
