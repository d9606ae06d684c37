"""Pairs of an image and a text, with SigLIP's loss over the batches of all ranks, larger than
memory.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import timm
import torch
from torch import nn
from torch.nn.functional import normalize

import distap
from distap.ranking.losses.pairs import Sigmoid


class TwoTowers(nn.Module):
    """Gives two descriptors of each pair in one row, (n, 2 C)."""

    def __init__(self):
        super().__init__()
        self.image = timm.create_model("test_resnet", num_classes=32)
        self.text = nn.Sequential(nn.EmbeddingBag(1000, 64), nn.Linear(64, 32))

    def forward(self, pair):
        return torch.cat([self.image(pair["image"]), self.text(pair["text"])], dim=1)


@dataclass(frozen=True)
class BetweenTowers(distap.DescriptorLoss):
    """The loss `sigmoid` between all images and all texts; those of one label belong together."""

    sigmoid: Sigmoid = field(default_factory=Sigmoid)
    needs_positives: ClassVar[bool] = False  # a pair may be the only one with its label

    @property
    def learned(self):
        return self.sigmoid.learned  # scale and bias

    def loss(self, rows, labels):
        images, texts = (normalize(half) for half in rows.chunk(2, dim=1))
        same = labels[:, None] == labels
        return self.sigmoid.loss(images @ texts.t(), same, ~same).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    network = TwoTowers().eval()
    multistage = distap.Multistage(network, BetweenTowers(), micro_batch=16)
    pairs = {"image": torch.randn(64, 3, 64, 64), "text": torch.randint(1000, (64, 12))}
    loss = multistage(pairs, torch.arange(64))  # a label for each pair
    loss.backward()
    optimizer = torch.optim.Adam([*network.parameters(), *multistage.learned.parameters()], lr=1e-4)
    optimizer.step()
    print(f"loss {loss.item():.4f}")
