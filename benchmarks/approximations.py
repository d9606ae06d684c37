"""The gradient that cheaper steps give, beside the exact one of the global batch.

All gradients of a batch are taken at the same parameters. What differs is the gradient of each
descriptor; the replay that turns it into the gradient of the parameters is the same for all.
"""

import copy
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn.functional import cosine_similarity
from typer import Option

from benchmarks import harness
from benchmarks.materialised import materialised_loss
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.model.network import RetrievalNetwork
from distap.multistage import Multistage
from distap.ranking.losses.building import build_loss
from distap.ranking.rank import rank
from distap.stages.replica import computing_in
from distap.stopwatch import Stopwatch
from distap.telemetry.terminal import track
from distap.training.build import images_of, network_of
from distap.world import World

EXACT = "exact"
BF16 = "describe in bf16"
CHECKED = 64  # images of the batch that shows that `exact` is exact
# 1 - cos of float32 and float64 at most; a float32 similarity may fall into another bin
ROUNDING = 1e-3
LEAST = 0.1  # cosine between exact gradients of two batches that makes a share of it worth printing
CAPTION = (
    "cos, norm: of the gradient of all parameters, beside the exact one of the same batch. by"
    " descriptors: cos of the descriptors' gradients. other: cos to the exact gradients of the"
    " other batches; of: that over the exact one's. replayed: share of the images. Means over the"
    " batches, and their standard deviations."
)
COLUMNS = (
    "gradient={method}|cos={cosine:.4f}|sd={cosine_sd:.4f}|norm={norm:.3f}|sd={norm_sd:.3f}|"
    "by descriptors={by_descriptors:.4f}|other={other:.3f}|sd={other_sd:.3f}|of={of_exact:.2f}|"
    "replayed={replayed:.0%}"
)
CHECK_CAPTION = (
    "float32 in micro-batches against one backward pass through the whole batch in float64, for the"
    " loss of which `float64` says who computes it. error: length of the difference over the"
    " length."
)
CHECK = (
    "loss={loss}|float64={reference}|Multistage: error={multistage:.0e}|1 -"
    " cos={multistage_sine:.0e}|here: error={here:.0e}|1 - cos={here_sine:.0e}"
)


class Images(NamedTuple):
    """A batch, class by class, and its descriptors."""

    pixels: Tensor  # (B, 3, size, size) uint8
    labels: Tensor  # (B,)
    descriptors: dict[str, Tensor]  # (B, C) by the precision of describe


class ApproximationsBenchmark(harness.Benchmark):
    """Print how far cheaper gradients are from the exact one of the global batch.

    They are: describe in bfloat16, no replay of images with a short gradient, and the mean of the
    gradients of small batches, cut from the global one by classes. Beside them stands the exact
    gradient of other batches, which is what sampling alone changes. Batches come from the recipe's
    images, as it augments them, and from its network.
    """

    name: ClassVar[str] = "approximations"
    recipe: Annotated[Path, Option(help="A recipe, or its name.")] = Path("emoji")
    set: Annotated[
        list[str], Option(help="A change to it, such as data.train=SHARDS; repeat for several.")
    ] = []
    loss: Annotated[list[str], Option(help="A loss; repeat for several.")] = [
        "ap_q",
        "smooth_ap",
        "roadmap",
        "triplet",
        "multi_similarity",
    ]
    batch: Annotated[
        list[int], Option(help="Images of a global batch, B; repeat for several.", min=8)
    ] = [256, 1024]
    images: Annotated[int, Option(help="Images of a class.", min=2)] = 4
    small: Annotated[
        list[int], Option(help="Images of a small batch; repeat for several.", min=4)
    ] = [
        32,
        64,
        128,
        256,
        512,
    ]
    skip_below: Annotated[
        list[float], Option(help="A replay.skip_below; repeat for several.", min=0, max=1)
    ] = [
        0.01,
        0.1,
        0.3,
    ]
    bf16: Annotated[bool, Option(help="Describe in bfloat16 too.")] = True
    seeds: Annotated[int, Option(help="Batches of each size, the recipe's first steps.", min=2)] = 3
    micro_batch: harness.MicroBatch = 32
    threads: harness.Threads = 1

    @model_validator(mode="after")
    def _check(self) -> "ApproximationsBenchmark":
        for size in (*self.batch, *self.small):
            if size % self.images or size < 2 * self.images:
                raise DistapError(
                    "command.wrong_option",
                    f"{size} images are not two classes or more of {self.images} images each",
                )
        return self

    def report(self) -> harness.Report:
        torch.set_num_threads(self.threads)
        network = network_of(load_recipe(self.recipe, self.set), World()).train()
        [first] = self._batches(network, max(CHECKED // self.images, 2) * self.images, 1)
        checks = [self._checked(network, loss, first) for loss in self.loss]
        rows = list[harness.Row]()
        tables = [harness.table_of("the exact gradient", CHECK_CAPTION, checks, CHECK)]
        for size in self.batch:
            batches = self._batches(network, size, self.seeds)
            for loss in track(self.loss, f"losses of B = {size}", len(self.loss)):
                of_loss = self._rows(network, loss, size, batches)
                rows += of_loss
                title = f"{loss}, B = {size}, {len(batches)} batches"
                tables.append(harness.table_of(title, CAPTION, summary(of_loss), COLUMNS))
        return harness.Report({"check": checks, "rows": rows}, tables)

    def _batches(self, network: RetrievalNetwork, size: int, count: int) -> list[Images]:
        """Load and describe the global batches of the recipe's first steps."""
        sampling = (
            f"sampling={{name: p_by_k, classes: {size // self.images}, images: {self.images}}}"
        )
        recipe = load_recipe(self.recipe, [*self.set, sampling])
        describers = {EXACT: computing_in("float32", network)}
        if self.bf16:
            describers[BF16] = computing_in("bf16", network)
        batches = []
        for share in track(
            images_of(recipe, World(), Stopwatch()).shares(range(count)), f"B = {size}", count
        ):
            pixels = share.images(slice(0, size)).clone()[share.present]
            micro_batches = pixels.split(self.micro_batch)
            with torch.no_grad():
                descriptors = {
                    name: torch.cat([*map(describe, micro_batches)])
                    for name, describe in describers.items()
                }
            batches.append(Images(pixels, share.labels[share.present], descriptors))
        return batches

    def _rows(
        self, network: RetrievalNetwork, loss: str, size: int, batches: Sequence[Images]
    ) -> list[harness.Row]:
        gradients = [self._gradients(network, loss, batch) for batch in batches]
        rows = []
        for seed, (by_descriptors, by_parameters, replayed) in enumerate(gradients):
            exact = by_parameters[EXACT]
            of_other_seeds = [
                other[1][EXACT] for number, other in enumerate(gradients) if number != seed
            ]
            for method, gradient in by_parameters.items():
                row = {
                    "cosine": cosine(gradient, exact),
                    "norm": float(gradient.norm() / exact.norm()),
                    "by_descriptors": cosine(by_descriptors[method], by_descriptors[EXACT]),
                    "other": statistics.fmean(cosine(gradient, other) for other in of_other_seeds),
                    "replayed": replayed[method],
                }
                columns = {"loss": loss, "batch": size, "seed": seed, "method": method}
                rows.append(columns | {name: round(value, 6) for name, value in row.items()})
        return rows

    def _gradients(
        self, network: RetrievalNetwork, loss: str, batch: Images
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        """Gradients of the descriptors (B, C), those of all parameters, and shares of replayed
        images, by method.
        """
        total = len(batch.labels)
        described = {
            name: rank(descriptors, batch.labels, loss).gradient
            for name, descriptors in batch.descriptors.items()
        }
        for size in self.small:
            if size < total:
                described[f"mean of B = {size}"] = mean_of_small(loss, batch, size // self.images)
        everything = torch.arange(total)
        exact = described.pop(EXACT)
        sent = replayed(network, batch.pixels, everything, [*described.values()], self.micro_batch)
        gradients = dict(zip(described, sent, strict=True))
        # Images in bands of length: what a threshold leaves is a sum of bands.
        length = exact.norm(dim=1) / exact.norm(dim=1).max()
        limits = sorted({0.0, *self.skip_below})
        masks = {
            low: (length > low) & (length <= high) for low, high in pairwise([*limits, torch.inf])
        }
        bands = {
            low: replayed(
                network, batch.pixels, mask.nonzero().flatten(), [exact], self.micro_batch
            )[0]
            for low, mask in masks.items()
        }
        shares = dict.fromkeys(gradients, 1.0)
        for limit in limits:
            name = f"skip_below {limit:g}" if limit else EXACT
            gradients[name] = torch.stack(
                [band for low, band in bands.items() if low >= limit]
            ).sum(0)
            described[name] = exact * (length > limit)[:, None]
            shares[name] = float((length > limit).float().mean())
        return described, gradients, shares

    def _checked(self, network: RetrievalNetwork, loss: str, batch: Images) -> harness.Row:
        """Compare the three stages, and the replay here, with autograd through the whole batch in
        float64.
        """
        double = copy.deepcopy(network).double()
        descriptors = double(batch.pixels)
        try:
            reference = "every pair, by autograd"
            materialised_loss(build_loss(loss), descriptors, batch.labels).backward()
        except TypeError:
            reference = "distap's ranking"
            descriptors.backward(rank(descriptors, batch.labels, loss).gradient)
        exact = flat([parameter.grad for parameter in trained(double)])
        Multistage(network, loss, self.micro_batch)(batch.pixels, batch.labels).backward()
        multistage = flat([parameter.grad for parameter in trained(network)])
        network.zero_grad()
        gradient = rank(batch.descriptors[EXACT], batch.labels, loss).gradient
        rows = torch.arange(len(batch.labels))
        [here] = replayed(network, batch.pixels, rows, [gradient], self.micro_batch)
        row: harness.Row = {"loss": loss, "reference": reference}
        for name, found in (("multistage", multistage), ("here", here)):
            row[name] = float((found.double() - exact).norm() / exact.norm())
            row[f"{name}_sine"] = 1 - cosine(found, exact)
            if not row[f"{name}_sine"] <= ROUNDING:
                raise DistapError(
                    "loss.inexact", f"{loss}: the gradient of {name} is not that of float64: {row}"
                )
        return row


def mean_of_small(loss: str, batch: Images, classes: int) -> Tensor:
    """Gradient of the descriptors by the mean of the losses of batches of so many classes, the last
    of more.
    """
    _, number = batch.labels.unique_consecutive(return_inverse=True)
    count = (int(number[-1]) + 1) // classes
    small_batch = (number // classes).clamp(max=count - 1)
    gradient = torch.zeros_like(batch.descriptors[EXACT])
    for rows in (small_batch == number_of_batch for number_of_batch in range(count)):
        gradient[rows] = (
            rank(batch.descriptors[EXACT][rows], batch.labels[rows], loss).gradient / count
        )
    return gradient


def replayed(
    network: RetrievalNetwork, pixels: Tensor, rows: Tensor, gradients: Sequence[Tensor], size: int
) -> list[Tensor]:
    """Stage three: gradients of all parameters from several gradients (B, C) of the same
    descriptors.
    """
    parameters = trained(network)
    sums = [[torch.zeros_like(parameter) for parameter in parameters] for _ in gradients]
    for chunk in rows.split(size):
        descriptors = network(pixels[chunk])
        for gradient, total in zip(gradients, sums, strict=True):
            torch._foreach_add_(
                total,
                torch.autograd.grad(descriptors, parameters, gradient[chunk], retain_graph=True),
            )
    return [flat(total) for total in sums]


def trained(network: RetrievalNetwork) -> list[Tensor]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def cosine(gradient: Tensor, other: Tensor) -> float:
    """Cosine between two gradients of any shape, in float64."""
    return float(cosine_similarity(gradient.flatten().double(), other.flatten().double(), dim=0))


def summary(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """Mean and standard deviation over the batches, by method."""
    means = []
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        names = ("cosine", "norm", "by_descriptors", "other", "replayed")
        row: harness.Row = {
            name: statistics.fmean(row_of_seed[name] for row_of_seed in of_method) for name in names
        }
        row |= {
            f"{name}_sd": statistics.stdev(row_of_seed[name] for row_of_seed in of_method)
            for name in names
        }
        means.append({"method": method} | row)
    exact = next(row for row in means if row["method"] == EXACT)
    # Where batches have next to nothing in common, a share of that says nothing.
    expected = exact["other"] if exact["other"] > LEAST else None
    ordered = sorted(means, key=lambda row: row is not exact)
    return [row | {"of_exact": harness.over(row["other"], expected)} for row in ordered]
