"""Figures of each data set of a training on several, and weights that follow their losses."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from distap.data.loading.indexed import IndexedImages
from distap.data.loading.share import ShareOfBatch, TrainingImages
from distap.data.mixing import Mixture, mixed
from distap.errors import DistapError, logger
from distap.training.learner import StepResult

DECIMALS = 3  # of the shares that follow the losses: the ranks' rounding changes no batch


class SetFigures(NamedTuple):
    """Figures of one data set in a step, over all ranks."""

    images: int  # that took part
    damaged: int
    queries: int
    loss: float  # mean over the queries; NaN without any, or for a loss that is no mean over them


def set_names(images: TrainingImages) -> tuple[str, ...]:
    """Return the names of the data sets that are trained on, none if there is only one."""
    if isinstance(images, IndexedImages) and isinstance(images.plan.sampling, Mixture):
        names = images.plan.sampling.names
        return names if len(names) > 1 else ()
    return ()


def counts_by_set(
    names: Sequence[str], share: ShareOfBatch, result: StepResult
) -> Float64[Tensor, "S 4"]:
    """Return this rank's images, damaged images, queries and sum of losses, by data set.

    Sum them over ranks, and give them to `figures_by_set`.
    """
    counts = torch.zeros(len(names), 4, dtype=torch.float64)
    if not names:
        return counts
    # The name of a damaged image begins with that of its set; see `MixedImages.where`.
    damaged = Counter(failure.name.partition(":")[0] for failure in share.failures)
    for number, name in enumerate(names):
        is_of_set = share.labels[:, -1] == number
        counts[number, 0] = (is_of_set & share.present).sum()
        counts[number, 1] = damaged[name]
        if result.per_query is not None:
            losses = result.per_query.cpu()[is_of_set]
            losses = losses[~losses.isnan()]
            counts[number, 2] = len(losses)
            counts[number, 3] = losses.sum()
    return counts


def figures_by_set(
    names: Sequence[str], counts: Float64[Tensor, "S 4"], loss: float
) -> dict[str, SetFigures]:
    """Return the figures of each set of which a step had images or damage, by name.

    Args:
        counts: those of `counts_by_set`, summed over the ranks.
        loss: of the whole batch, which is that of a set alone in it.
    """
    figures = dict[str, SetFigures]()
    is_alone = int((counts[:, 0] > 0).sum()) == 1
    for name, (images, damaged, queries, total) in zip(names, counts.tolist(), strict=True):
        if not images and not damaged:
            continue
        mean = total / queries if queries else float("nan")
        if is_alone and images and not queries:
            mean = loss
        figures[name] = SetFigures(int(images), int(damaged), int(queries), mean)
    return figures


@dataclass
class FollowedWeights:
    """Weights of data sets that follow the means of their losses; part of a run's state.

    After every `every` steps a set's weight is that of the recipe times the mean of its loss in
    these steps, so that batches go to the sets that are learned more slowly (Ypsilantis et al.
    2024, UDON). With this table a batch is still a function of data sets, seed, step and table.
    """

    images: IndexedImages
    every: int

    def __post_init__(self) -> None:
        self._recipe = self._mixture
        self._sums = torch.zeros(len(self._recipe.names), 2, dtype=torch.float64)
        self._means = torch.full((len(self._recipe.names),), torch.nan, dtype=torch.float64)

    @property
    def _mixture(self) -> Mixture:
        mixture = self.images.plan.sampling
        assert isinstance(mixture, Mixture)
        return mixture

    def observe(self, figures: Mapping[str, SetFigures], loss: float) -> None:
        """Take the losses of a step into account; `loss` is that of the whole batch.

        Raises:
            DistapError: the batch has a loss, but no data set has one of its own.
        """
        if math.isfinite(loss) and not any(
            math.isfinite(of_set.loss) for of_set in figures.values()
        ):
            raise DistapError(
                "sampling.no_losses",
                "sampling.follow_loss: the loss of a batch is no mean over its queries, so no data"
                " set has one of its own: take another loss, or sampling.mix: one",
            )
        for number, name in enumerate(self._mixture.names):
            if name in figures and math.isfinite(figures[name].loss):
                self._sums[number] += _numbers([1.0, figures[name].loss])

    def renew(self, done: int) -> None:
        """Weigh the sets anew from step `done` on, once."""
        if self._mixture.shares.first == done:  # as before a checkpoint
            return
        world = self.images.world
        # Rank 0's count, as of a table of mined classes.
        self._sums = world.broadcast(self._sums.to(world.device)).cpu()
        drawn = self._sums[:, 0] > 0
        if not drawn.any():  # no step had a finite loss
            return
        # A set that came in none of the steps keeps its last mean, at first that of the others.
        self._means[drawn] = self._sums[drawn, 1] / self._sums[drawn, 0]
        means = torch.where(self._means.isnan(), self._means.nanmean(), self._means).clamp(min=0)
        self._sums.zero_()
        weights = self._recipe.shares.weights
        base = _numbers(float(weight / sum(weights)) for weight in weights)
        followed = base * means / max(float((base * means).sum()), 1e-12)
        first = done, self._mixture.shares.before(done, self.images.plan.seed).tolist()
        # Nearer to the recipe's weights, if a set has too few classes for its part of a batch.
        for nearness in (0.0, 0.25, 0.5, 0.75):
            if self._fits(nearness * base + (1 - nearness) * followed, *first):
                break
        else:
            self._weigh(weights, *first)
        weights = self._mixture.shares.weights
        shares = ", ".join(
            f"{name} {float(weight / sum(weights)):.3f}"
            for name, weight in zip(self._mixture.names, weights, strict=True)
        )
        logger.info("after step %d the shares of the data sets are: %s", done, shares)

    def _fits(self, shares: Tensor, first: int, taken: Sequence[int]) -> bool:
        """Weigh the sets by shares; return False, and change none, if one is too small for its."""
        rounded = [round(share, DECIMALS) for share in shares.clamp(min=10.0**-DECIMALS).tolist()]
        try:
            self._weigh([Fraction(str(share)) for share in rounded], first, taken)
        except DistapError:
            return False
        return True

    def _weigh(self, weights: Sequence[Fraction], first: int, taken: Sequence[int]) -> None:
        named = dict(zip(self._recipe.names, weights, strict=True))
        sampling = mixed(self._recipe.sampling, named, first, taken)
        self.images.draw_by(replace(self.images.plan, sampling=sampling))

    def state_dict(self) -> dict[str, Tensor]:
        shares = self._mixture.shares
        return {
            "sums": self._sums,
            "means": self._means.nan_to_num(-1.0),  # a checkpoint holds finite numbers
            "weights": _numbers(map(float, shares.weights)),
            "taken": torch.tensor(shares.taken, dtype=torch.int64),
            "first": torch.tensor(shares.first),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sums.copy_(state["sums"])
        means = state["means"]
        self._means.copy_(torch.where(means < 0, torch.nan, means))
        if int(state["first"]):
            weights = [Fraction(str(weight)) for weight in state["weights"].tolist()]
            self._weigh(weights, int(state["first"]), state["taken"].tolist())


def _numbers(values: Iterable[float]) -> Float64[Tensor, " n"]:
    return torch.tensor(list(values), dtype=torch.float64)
