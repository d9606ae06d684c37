"""One part of every kind that a recipe can choose by name, written as somebody outside distap would
write it.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from distap.data.loading.indexed import IndexedImages
from distap.ranking.losses.base import SimilarityLoss


@dataclass(frozen=True)
class HardestNegative(SimilarityLoss):
    margin: float = 0.1

    def loss(self, similarities, positive, negative):
        hardest = similarities.masked_fill(~negative, -1).amax(dim=1, keepdim=True)
        return ((hardest - similarities + self.margin).clamp(min=0) * positive).sum(
            1
        ) / positive.sum(1)


@dataclass(frozen=True)
class InOrder:
    """The samples in the order of the data set."""

    batch_size: int = 12

    @property
    def size(self) -> int:
        return self.batch_size

    def check(self, classes) -> None:
        assert self.batch_size <= len(classes)

    def batch(self, classes, seed: int, step: int):
        return (np.arange(self.batch_size) + step * self.batch_size) % len(classes)


@dataclass(frozen=True)
class InGivenOrder(InOrder):
    """A sampling with fields that have no hash."""

    shifts: dict[str, int] = field(default_factory=lambda: {"odd": 1})
    steps: list[int] = field(default_factory=lambda: [2])

    def batch(self, classes, seed: int, step: int):
        return (super().batch(classes, seed, step) + self.shifts["odd"]) % len(classes)


@dataclass(frozen=True)
class Repeating(InOrder):
    def batch(self, classes, seed: int, step: int):
        return np.zeros(self.batch_size, dtype=np.int64)


@dataclass(frozen=True)
class NoPairs(InOrder):
    batch_size: int = 4

    def batch(self, classes, seed: int, step: int):
        sizes = [len(classes.samples(number)) for number in range(len(classes.sizes))]
        return np.cumsum([0, *sizes])[: self.batch_size]


@dataclass(frozen=True)
class ForgetsTheSeed(InOrder):
    def batch(self, classes, seed: int, step: int):
        return np.random.default_rng().permutation(len(classes))[: self.batch_size]


@dataclass(frozen=True)
class NoCheck:
    batch_size: int = 4

    def batch(self, classes, seed: int, step: int):
        return np.arange(self.batch_size)


@dataclass(frozen=True)
class FailingSampling(InOrder):
    def batch(self, classes, seed: int, step: int):
        raise KeyError("no such shelf")


@dataclass(frozen=True)
class CountsAlone(HardestNegative):
    def loss(self, similarities, positive, negative):
        return similarities.argmax(1).to(similarities.dtype)


@dataclass(frozen=True)
class FailingLoss(HardestNegative):
    shares: list[float] = field(default_factory=list)

    def loss(self, similarities, positive, negative):
        return similarities[:, 0] * self.shares[0]


@dataclass(frozen=True)
class WithLists(HardestNegative):
    shares: list[float] = field(default_factory=lambda: [1.0])
    of: dict[str, float] = field(default_factory=lambda: {"a": 1.0})


@dataclass(frozen=True)
class TwoConvolutions:
    channels: int = 8

    def build(self) -> nn.Module:
        network = nn.Sequential(
            nn.Conv2d(3, self.channels, 3, stride=4),
            nn.ReLU(),
            nn.Conv2d(self.channels, self.channels, 3),
        )
        network.num_features = self.channels
        return network


class LostDevice(TwoConvolutions):
    def build(self) -> nn.Module:
        network = super().build()
        network.register_forward_pre_hook(self.fail)
        return network

    def fail(self, network, pixels):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Maximum(nn.Module):
    def forward(self, features):
        return features.amax(dim=(-2, -1))


@dataclass(frozen=True)
class MaxPooling:
    def build(self) -> nn.Module:
        return Maximum()


@dataclass(frozen=True)
class OwnIndex:
    """A source that opens the images in its own way."""

    def open(self, job, world, stopwatch):
        return IndexedImages(job, world, stopwatch)


@dataclass(frozen=True)
class CentreOnly:
    """No variation: the centre, scaled."""

    def transform(self, image_size: int):
        return _Centre(image_size)


@dataclass(frozen=True)
class CentreOfList(CentreOnly):
    choices: list[int] = field(default_factory=lambda: [1])
    shares: dict[str, float] = field(default_factory=lambda: {"a": 0.5})


@dataclass(frozen=True)
class FailingAugmentation:
    def transform(self, image_size: int):
        return self.fail

    def fail(self, image):
        raise ZeroDivisionError("no shelf is empty")


@dataclass(frozen=True)
class FloatPixels:
    def transform(self, image_size: int):
        centre = _Centre(image_size)
        return lambda image: centre(image) / 255


@dataclass(frozen=True)
class DrawsElsewhere:
    def transform(self, image_size: int):
        centre = _Centre(image_size)
        return lambda image: centre(image) // random.randrange(1, 200)


@dataclass(frozen=True)
class _Centre:
    size: int

    def __call__(self, image):
        width, height = image.size
        side = min(width, height)
        left = (width - side) // 2
        top = (height - side) // 2
        return image.crop((left, top, left + side, top + side), (self.size, self.size))


@dataclass(frozen=True)
class SignDescent:
    """The parameters move by the sign of their gradient."""

    momentum: float = 0.0

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Rprop(groups, lr=0.0)


@dataclass(frozen=True)
class Halving:
    every: int = 1

    def factor(self, step: int, steps: int) -> float:
        return 0.5 ** (step // self.every)


@dataclass
class LinesInFile:
    file: Path

    def prepare(self) -> None:
        pass

    def open(self, run) -> None:
        self._opened = self.file.open("a")

    def log(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        print(json.dumps({"step": step, **figures}), file=self._opened)

    def close(self, failed: bool) -> None:
        print(json.dumps({"failed": failed}), file=self._opened)
        self._opened.close()
