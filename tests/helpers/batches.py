"""Batches and networks small enough to check a step by hand."""

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.functional import normalize

from distap.world import World


class TensorBatch:
    """A rank's share of images that are there already."""

    def __init__(self, images: Tensor, labels: Tensor, world: World, step: int = 0) -> None:
        own_rows = slice(world.rank, None, world.size)
        self.step = step
        self.total = len(images)
        self.order = None
        self.labels = labels[own_rows]
        self.present = torch.ones(len(self.labels), dtype=torch.bool)
        self.pixels = images[own_rows].clone()
        self.extra = {}
        self.samples = torch.tensor(world.slots(len(images)))

    def images(self, rows: slice) -> Tensor:
        return self.pixels[rows]

    def blank(self, rows: Tensor) -> None:
        self.pixels[rows] = 0


class SmallNetwork(nn.Module):
    """Convolution, frozen BatchNorm, a residual block with stochastic depth, dropout, descriptors
    of length 1.
    """

    def __init__(self, dropout: float = 0.0, drop_path: float = 0.0, frozen: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.drop_path = DropPath(drop_path)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)
        self.frozen = frozen
        nn.init.uniform_(self.norm.running_mean, -0.2, 0.2)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def train(self, mode: bool = True) -> "SmallNetwork":
        super().train(mode)
        if self.frozen:
            self.norm.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.stem(images)))
        features = features + self.drop_path(torch.relu(self.block(features)))
        return normalize(self.head(self.dropout(features.mean((2, 3)))))


def small_network(**settings: float) -> SmallNetwork:
    """In float64 and training mode, the same every time."""
    torch.manual_seed(0)
    return SmallNetwork(**settings).double().train()


def small_images(count: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Float64 images (count, 3, 9, 9) and labels of classes of unequal size."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 9, 9, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return images + labels.view(-1, 1, 1, 1) / 3, labels
