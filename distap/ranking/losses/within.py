"""Losses within each of several data sets, whose images are no negatives of one another."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from distap.errors import DistapError
from distap.ranking.gathered import Gathered
from distap.ranking.loss import Budget, Counter, KnownClasses, Loss, LossValue
from distap.ranking.losses.sums import Inner, SumOfLosses

# Numbers in the training set of the classes of a data set, ascending.
ClassNumbers = Int64[Tensor, " K_s"]


class LossOfSets(SumOfLosses):
    """A loss for each data set of a batch, of the images of that set alone.

    The last level of the labels is the number of an image's data set. With Q_s queries of set s,
    and Q of all sets, the loss is the sum of Q_s / Q L_s: a mean over all queries, if each L_s is
    one over those of its set. A set without queries adds nothing.
    """

    @abstractmethod
    def loss_of(self, number: int) -> Loss:
        """Return the loss of a data set; raise a DistapError if it has none."""

    def classes_of(self, number: int) -> ClassNumbers | None:
        """Return the classes of a data set, which its loss numbers from 0; None: as they are."""
        return None

    @property
    def is_ap(self) -> bool:  # type: ignore[override]
        return all(loss.is_ap for _, loss in self.parts)

    def counter(self, pairs: int, budget: Budget) -> Counter:
        return Counter(self, budget)

    def is_query(self, gathered: Gathered) -> Bool[Tensor, " B"]:
        is_query = torch.zeros_like(gathered.samples, dtype=torch.bool)
        for chosen, loss, images in self._sets(_without_descriptors(gathered)):
            is_query[chosen] = loss.is_query(images)
        return is_query

    def has_negatives(self, gathered: Gathered) -> bool:
        return any(
            bool(loss.is_query(images).any()) and loss.has_negatives(images)
            for _, loss, images in self._sets(_without_descriptors(gathered))
        )

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        gradient = torch.zeros_like(gathered.descriptors[gathered.own])
        value = gradient.new_zeros((), dtype=torch.float64)
        per_query = torch.full_like(gradient[:, 0], torch.nan, dtype=torch.float64)
        is_by_query = True
        slopes = {id(parameter): torch.zeros_like(parameter) for parameter in self.parameters}
        is_query = self.is_query(gathered)
        queries = int(is_query.sum())
        # All ranks go over the same sets in the same order, since their losses call collectives.
        for chosen, loss, images in self._sets(gathered):
            share = int((is_query & chosen).sum()) / queries
            if not share:
                continue
            ranked = loss.value_and_gradient(images, budget)
            rows = chosen[gathered.own]
            value += share * ranked.value
            gradient[rows] = share * ranked.gradient
            if ranked.per_query is None:
                is_by_query = False
            else:
                per_query[rows] = ranked.per_query
            for parameter, slope in zip(loss.parameters, ranked.by_parameters, strict=True):
                slopes[id(parameter)] += share * slope
        return LossValue(
            value=value,
            per_query=per_query if is_by_query else None,
            gradient=gradient,
            by_parameters=tuple(slopes.values()),
        )

    def _sets(self, gathered: Gathered) -> Iterator[tuple[Bool[Tensor, " B"], Loss, Gathered]]:
        """Yield for each data set which images of the batch are of it, its loss and its images.

        The labels of these have one level less.
        """
        _refuse_one_level(gathered.gallery_levels)
        batch = len(gathered.samples)
        numbers = gathered.gallery_levels[:, -1]
        for number in numbers[:batch].unique().tolist():
            loss = self.loss_of(number)
            chosen = numbers == number
            images = gathered.only(chosen)
            levels = images.gallery_levels[:, :-1].clone()
            classes = self.classes_of(number)
            if classes is not None:
                levels[:, 0] = _places(levels[:, 0], classes, number)
            yield chosen[:batch], loss, replace(images, gallery_levels=levels)


@dataclass(frozen=True)
class Within(LossOfSets):
    """A loss within each data set: its queries are ranked against images of the same set alone.

    It is a mean over the queries of all sets. Each set has parameters of its own.
    """

    inner: Inner
    """Loss of the images of one set, such as smooth_ap or {name: arc_face, margin: 0.3}."""

    @property
    def parts(self) -> Sequence[tuple[float, Loss]]:
        return [(1.0, self.inner)]

    def loss_of(self, number: int) -> Loss:
        loss: Loss = self.inner
        return loss

    @cached_property
    def learned(self) -> nn.Module | None:
        try:
            learned = self.inner.learned
        except DistapError as error:
            if error.code != "loss.unknown_classes":
                raise
            learned = error
        if learned is not None:
            raise DistapError(
                "loss.unknown_sets",
                f"within: inner is {type(self.inner).__name__}, which has parameters, and each data"
                " set needs some of its own, but the data sets and their classes are unknown here;"
                " use by_set, with `classes` of each, such as {by_set: {faces: {name: arc_face,"
                " classes: 1000}}}",
            )
        return None

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> LossOfSets:
        by_set = _classes_by_set(classes)
        if by_set is None:
            return replace(self, inner=self.inner.sized(None, dimensions, seed))
        return _sized(dict.fromkeys(by_set, self.inner), by_set, dimensions, seed)


@dataclass(frozen=True)
class BySet(LossOfSets):
    """A loss of its own for each data set, of queries and images of that set alone.

    Set i is the i-th name in sorted order. The whole is a mean over the queries of all sets. Where
    the classes of the training set are unknown, losses with `classes` take the labels from 0 on,
    one after another.
    """

    losses: dict[str, Inner]
    """Loss of each data set, such as {faces: arc_face, products: smooth_ap}."""

    def __post_init__(self) -> None:
        if not self.losses:
            raise ValueError("by_set needs a loss at least, by the name of its data set")

    @cached_property
    def parts(self) -> Sequence[tuple[float, Loss]]:
        return [(1.0, self.losses[name]) for name in sorted(self.losses)]

    def classes_of(self, number: int) -> ClassNumbers | None:
        counts = [_class_count(loss) for _, loss in self.parts[: number + 1]]
        start = sum(count or 0 for count in counts[:number])
        count = counts[number]
        return None if count is None else torch.arange(start, start + count)

    def loss_of(self, number: int) -> Loss:
        if number >= len(self.losses):
            raise DistapError(
                "loss.unknown_set",
                f"by_set has losses for data sets 0 to {len(self.losses) - 1}"
                f" ({', '.join(sorted(self.losses))}), but there are images of set {number}",
            )
        return self.parts[number][1]

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> LossOfSets:
        by_set = _classes_by_set(classes)
        if by_set is None:
            losses = {
                name: loss.sized(None, dimensions, seed) for name, loss in self.losses.items()
            }
            return replace(self, losses=losses)
        return _sized({number: self.loss_of(number) for number in by_set}, by_set, dimensions, seed)


@dataclass(frozen=True)
class SizedLossOfSets(LossOfSets):
    """Losses of the data sets of a training, whose classes are known."""

    losses: Mapping[int, Loss]
    # ranks compare the loss by its repr
    class_numbers: Mapping[int, ClassNumbers] = field(repr=False, compare=False)

    @cached_property
    def parts(self) -> Sequence[tuple[float, Loss]]:
        return [(1.0, loss) for loss in self.losses.values()]

    def loss_of(self, number: int) -> Loss:
        if number not in self.losses:
            raise DistapError(
                "loss.unknown_set",
                f"the training has data sets {', '.join(map(str, self.losses))}, but there are"
                f" images of set {number}",
            )
        return self.losses[number]

    def classes_of(self, number: int) -> ClassNumbers | None:
        return self.class_numbers[number]

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> LossOfSets:
        losses = {
            number: loss.sized(None, dimensions, seed) for number, loss in self.losses.items()
        }
        return replace(self, losses=losses)


def _sized(
    losses: Mapping[int, Any],
    classes: Mapping[int, Int64[Tensor, "K_s L"]],
    dimensions: int | None,
    seed: int,
) -> SizedLossOfSets:
    """Return the losses of data sets with parameters for the classes of each."""
    sized = dict[int, Loss]()
    for number, levels in classes.items():
        places = torch.arange(len(levels), device=levels.device)
        within = torch.column_stack([places, levels[:, 1:-1]])
        sized[number] = losses[number].sized(within, dimensions, seed)
    numbers = {number: levels[:, 0].contiguous() for number, levels in classes.items()}
    return SizedLossOfSets(sized, numbers)


def _classes_by_set(classes: KnownClasses) -> dict[int, Int64[Tensor, "K_s L"]] | None:
    """Return the rows of each data set's classes; None if the classes have no known numbers."""
    if not isinstance(classes, Tensor):
        return None
    levels = classes.view(len(classes), -1)
    _refuse_one_level(levels)
    numbers = levels[:, -1]
    return {number: levels[numbers == number] for number in numbers.unique().tolist()}


def _refuse_one_level(levels: Int64[Tensor, "N L"]) -> None:
    if levels.shape[1] < 2:
        raise DistapError(
            "loss.no_sets",
            "within and by_set need labels of two levels or more, (b, L), of which the last is the"
            " number of the data set; these have one level. A recipe names two data sets or more"
            " under data.train",
        )


def _places(labels: Int64[Tensor, " n"], classes: ClassNumbers, number: int) -> Int64[Tensor, " n"]:
    """Return the place of each label among the classes of its data set."""
    numbers = classes.to(labels.device)
    places = torch.searchsorted(numbers, labels.contiguous())
    wrong = numbers[places.clamp(max=len(numbers) - 1)] != labels
    if wrong.any():
        raise DistapError(
            "data.wrong_labels",
            f"label {int(labels[wrong][0])} is of data set {number}, but the {len(numbers)} classes"
            f" of that set have numbers from {int(numbers[0])} to {int(numbers[-1])}",
        )
    return places


def _class_count(loss: Loss) -> int | None:
    """Return the number of classes that a loss, or one within it, is set to."""
    counts = [getattr(loss, "classes", None)]
    counts += [_class_count(inner) for _, inner in getattr(loss, "parts", ())]
    return next((count for count in counts if count is not None), None)


def _without_descriptors(gathered: Gathered) -> Gathered:
    """Return a batch of labels alone, to count without copying descriptors."""
    return replace(gathered, gallery=gathered.gallery[:, :0])
