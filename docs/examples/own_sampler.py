"""Classes chosen by a rule of one's own, in a loop of one's own: `python own_sampler.py
photos/train`.

In a recipe the same class is `sampling: {name: "own_sampler:LongTail", classes: 8, images: 4}`,
with this folder on PYTHONPATH. A batch follows from the seed and the step alone, so a run can stop
and go on, on any number of ranks.
"""

import sys
from dataclasses import dataclass

import numpy as np
import timm
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import distap
from distap.data.plan import Classes, Plan
from distap.errors import DistapError


@dataclass(frozen=True)
class LongTail:
    """Draw classes with a chance that grows with a power of their size: 0 for all alike, 1 as
    images are.
    """

    classes: int = 8
    images: int = 4
    power: float = 0.5

    @property
    def size(self):
        return self.classes * self.images

    def check(self, data):
        if np.sum(data.sizes >= self.images) < self.classes:
            raise DistapError(
                "sampling.too_few_classes",
                f"fewer than {self.classes} classes have {self.images} images",
            )

    def batch(self, data, seed, step):
        random = np.random.default_rng([seed, step])
        usable = np.flatnonzero(data.sizes >= self.images)
        chances = data.sizes[usable] ** self.power
        chosen = random.choice(usable, self.classes, replace=False, p=chances / chances.sum())
        return np.concatenate(
            [random.choice(data.samples(c), self.images, replace=False) for c in chosen]
        )


if __name__ == "__main__":
    pixels = v2.Compose(
        [v2.RandomResizedCrop(64), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    )
    train = ImageFolder(sys.argv[1], pixels)
    plan = Plan(Classes(np.array(train.targets)), LongTail(), seed=0)
    network = timm.create_model("test_resnet", num_classes=0)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    multistage = distap.Multistage(network, loss="ap_q", micro_batch=16, freeze_batchnorm=True)
    # any batch sampler of torch can stand here
    batches = [plan.batch(step).tolist() for step in range(10)]
    for images, labels in DataLoader(train, batch_sampler=batches):
        loss = multistage(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
