"""Losses with a teacher, and KoLeo, written slowly and obviously from their definitions."""

import torch
from newer_losses import graded
from reference import listwise_loss
from torch import Tensor
from torch.nn.functional import normalize

from distap.ranking.loss import Loss

OF_TEACHER = ("distil_features", "distil_relations", "compatible")
OF_IMAGES = (
    "distil_features",
    "distil_relations",
    "koleo",
)  # they need no labels
GRADED = ("h_ap", "smooth_ndcg", "sup_ndcg")


def teacher_of(descriptors: Tensor) -> Tensor:
    """A teacher's descriptors, the same for as many of as many dimensions, near none of them."""
    generator = torch.Generator().manual_seed(11)
    drawn = torch.randn(descriptors.shape, generator=generator, dtype=torch.float64)
    return normalize(drawn).to(descriptors.dtype)


def extra_of(loss: Loss, descriptors: Tensor) -> dict[str, Tensor]:
    """What the loss takes of these images next to their labels."""
    return {"teacher": teacher_of(descriptors)} if "teacher" in loss.extras else {}


def weights_of(levels: Tensor, weights: str | Tensor) -> Tensor:
    labels = levels[:, 0].tolist()
    if isinstance(weights, Tensor):
        return weights.double()
    sizes = [labels.count(label) if weights == "class" else 1 for label in labels]
    return 1 / torch.tensor(sizes, dtype=torch.float64)


def distil_features(d: Tensor, t: Tensor, distance: str = "cosine") -> list[Tensor]:
    if distance == "cosine":
        return [1 - ours @ theirs for ours, theirs in zip(d, t, strict=True)]
    return [((ours - theirs) ** 2).sum() for ours, theirs in zip(d, t, strict=True)]


def distil_relations(
    d: Tensor,
    t: Tensor,
    form: str = "kl",
    temperature: float = 0.1,
    teacher_temperature: float = 0.1,
) -> list[Tensor]:
    losses = []
    for query in range(len(d)):
        other_rows = [j for j in range(len(d)) if j != query]
        ours = torch.stack([d[query] @ d[j] for j in other_rows])
        theirs = torch.stack([t[query] @ t[j] for j in other_rows])
        if form == "squared":
            losses.append(((ours - theirs) ** 2).mean())
            continue
        q = (ours / temperature).exp() / (ours / temperature).exp().sum()
        p = (theirs / teacher_temperature).exp() / (theirs / teacher_temperature).exp().sum()
        losses.append((p * (p.log() - q.log())).sum())
    return losses


def koleo(d: Tensor, epsilon: float = 1e-8) -> list[Tensor]:
    losses = []
    for query in range(len(d)):
        distances = [(d[query] - d[j]).norm() for j in range(len(d)) if j != query]
        nearest = distances[0]
        for distance in distances[1:]:
            if distance < nearest - 1e-12:
                nearest = distance
        losses.append(-torch.log(nearest + epsilon))
    return losses


def mean_of(losses: list[Tensor], levels: Tensor, weights: str | Tensor = "uniform") -> Tensor:
    weight = weights_of(levels, weights)
    return (weight * torch.stack(losses)).sum() / weight.sum()


def across(
    inner: str,
    queries: Tensor,
    images: Tensor,
    levels: Tensor,
    **settings: object,
) -> Tensor:
    """A listwise loss of queries against the descriptors of the same images by another network."""
    if inner in GRADED:  # whose weights are uniform
        return graded(
            inner,
            queries,
            levels,
            queries[:0],
            levels[:0],
            "uniform",
            images=images,
        )
    name = "ap_q" if inner == "softbin" else inner
    return listwise_loss(name, queries, levels[:, 0], images=images, **settings)


def compatible(
    d: Tensor,
    t: Tensor,
    levels: Tensor,
    inner: str = "smooth_ap",
    queries: str = "both",
    **settings: object,
) -> Tensor:
    of_student = across(inner, d, t, levels, **settings)
    of_teacher = across(inner, t, d, levels, **settings)
    both = (of_student + of_teacher) / 2
    return {"student": of_student, "teacher": of_teacher, "both": both}[queries]


def of_teacher(
    name: str,
    d: Tensor,
    t: Tensor,
    levels: Tensor,
    weights: str | Tensor = "uniform",
    **settings: object,
) -> Tensor:
    """One of the losses of descriptors, those of the teacher, and labels (B, L)."""
    t = normalize(t.to(d))
    if name == "compatible":
        return compatible(d, t, levels, weights=weights, **settings)
    if name == "koleo":
        return mean_of(koleo(d, **settings), levels, weights)
    function = {
        "distil_features": distil_features,
        "distil_relations": distil_relations,
    }[name]
    return mean_of(function(d, t, **settings), levels, weights)
