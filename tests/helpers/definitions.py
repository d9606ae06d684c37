"""Every loss of the registry next to its definition, for tests that go over all of them."""

from collections.abc import Callable, Sequence

import torch
from newer_losses import MARGINS, csl, graded, proxies_of
from reference import listwise_loss, proxies
from teachers import OF_TEACHER, of_teacher, teacher_of
from torch import Tensor
from torch.nn.functional import normalize

from distap.ranking.gathered import Gathered
from distap.ranking.loss import Budget, Loss, LossValue
from distap.ranking.losses.building import build_loss

Virtual = Sequence[tuple[int, int, float]]  # parents and α of the virtual images of `simix`
OF_SETS = ("within", "by_set")  # whose labels have the number of the data set as their last level
SOFTMAX = {"proxy_nca": (1 / 9, True), "normalized_softmax": (0.05, False)}


def levels_of(labels: Tensor, depth: int = 2) -> Tensor:
    """Labels of several levels, the finest first, of unequal classes."""
    return torch.stack([labels // 3**level for level in range(depth)], dim=1)


def built(name: str, classes: int, dimensions: int, dtype: torch.dtype = torch.float64) -> Loss:
    """A loss with its defaults, for labels by `levels_of`; `simix` is of `smooth_ap`, `matryoshka`
    of `ap_q`, `within` of `arc_face`, and `by_set` of that for every other data set.
    """
    options = {
        "csl": {"margins": MARGINS, "tree": levels_of(torch.arange(classes))[:, 1:].tolist()},
        "matryoshka": {"dimensions": [2, dimensions], "inner": "ap_q"},
        "simix": {"inner": "smooth_ap"},
        "within": {"inner": loss_of_set("within", 0)},
        "by_set": {
            "losses": {
                f"{number:04}": loss_of_set("by_set", number) for number in range(classes // 3 + 1)
            }
        },
    }
    mapping = (
        {"sup_ap": 0.3, "arc_face": 0.7}
        if name == "sum"
        else {"name": name, **options.get(name, {})}
    )
    numbers = levels_of(torch.arange(classes))
    loss = build_loss(mapping).sized(numbers if name in OF_SETS else classes, dimensions, 0)
    if loss.learned is not None:
        loss.learned.to(dtype)
    return loss


def defined(
    name: str, d: Tensor, levels: Tensor, learned: Sequence[Tensor] = (), virtual: Virtual = ()
) -> Tensor:
    """The same loss of descriptors (B, C) and labels (B, L), differentiable by them and by the
    learned parameters.
    """
    labels = levels[:, 0]
    if name in OF_SETS:
        return of_sets(name, d, levels, learned)
    if name in (*OF_TEACHER, "koleo"):
        return of_teacher(name, d, teacher_of(d), levels)
    if name == "sum":
        return 0.3 * defined("sup_ap", d, levels) + 0.7 * defined("arc_face", d, levels, learned)
    if name == "matryoshka":
        return defined("ap_q", normalize(d[:, :2]), levels) + defined("ap_q", d, levels)
    if name == "simix":
        mixed = torch.stack([alpha * d[a] + (1 - alpha) * d[b] for a, b, alpha in virtual])
        parents = [a for a, _, _ in virtual]
        return defined("smooth_ap", torch.cat([d, mixed]), torch.cat([levels, levels[parents]]))
    if name == "sigmoid":
        return listwise_loss(
            name, d, labels, **dict(zip(("bias", "log_scale"), learned, strict=True))
        )
    if name in ("h_ap", "smooth_ndcg", "sup_ndcg"):
        return graded(name, d, levels, d[:0], levels[:0], "uniform")
    if name == "csl":
        return csl(d, labels, *learned, levels_of(torch.arange(len(learned[0]))), "uniform")
    if name in SOFTMAX:
        return proxies(d, labels, *learned, *SOFTMAX[name])
    if learned:
        return proxies_of(name, d, labels, *learned)
    return listwise_loss("ap_q" if name == "softbin" else name, d, labels)


def loss_of_set(name: str, number: int) -> str:
    return "arc_face" if name == "within" or number % 2 else "smooth_ap"


def of_sets(name: str, d: Tensor, levels: Tensor, learned: Sequence[Tensor]) -> Tensor:
    """The mean, by queries, of the losses of each data set alone, whose labels begin at 0."""
    total = d.new_zeros(())
    queries = 0
    for number in levels[:, -1].unique().tolist():
        rows = levels[:, -1] == number
        labels = levels[rows, 0]
        of_set = loss_of_set(name, number)
        parameters = []
        if of_set == "arc_face":
            parameters = [learned[number if name == "within" else number // 2]]
        same = labels[:, None] == labels
        count = len(labels) if parameters else int((same.sum(1) > 1).sum())
        if count:
            labels = labels - 3 * number
            total = total + count * defined(of_set, d[rows], labels[:, None], parameters)
        queries += count
    return total / queries


def virtual_images(labels: Tensor, loss: Loss, rank: Callable[[Loss], object]) -> Virtual:
    """Parents and α of each virtual image, as the loss within `simix` is given them when `rank`
    ranks by it.
    """
    seen: list[Gathered] = []

    class Spy(type(loss.inner)):
        def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
            seen.append(gathered)
            return super().value_and_gradient(gathered, budget)

    rank(build_loss("simix", inner=Spy()))
    descriptors, virtual = seen[0].descriptors.split(
        [len(labels), len(seen[0].descriptors) - len(labels)]
    )
    pairs = [(a, b) for a in range(len(labels)) for b in range(a) if labels[a] == labels[b]]
    first, second = (descriptors[list(rows)] for rows in zip(*pairs, strict=True))
    # One descriptor of each pair is enough to solve for its α.
    alpha = ((virtual[:, None] - second) * (first - second)).sum(2, keepdim=True)
    alpha = alpha / (first - second).square().sum(1)[:, None]
    nearest = (alpha * first + (1 - alpha) * second - virtual[:, None]).norm(dim=2).min(1)
    assert len(virtual) == len(pairs) and nearest.values.max() < 1e-12
    return [
        (*pairs[number], float(alpha[row, number]))
        for row, number in enumerate(nearest.indices.tolist())
    ]
