"""Train on a folder of images in a loop of one's own, and print figures of unseen classes before
and after.

python plain.py photos/train photos/test      # each holds a sub-folder a class
"""

import sys

import timm
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import distap

size = 64
batch = 128
steps = 15
pixels = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
augmented = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *pixels])
plain = v2.Compose([v2.Resize(size), v2.CenterCrop(size), *pixels])
train = ImageFolder(sys.argv[1], augmented)
test = ImageFolder(sys.argv[2], plain)

network = timm.create_model("test_resnet", num_classes=0)  # or "resnet50", pretrained=True
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
multistage = distap.Multistage(network, loss="ap_q", micro_batch=16, freeze_batchnorm=True)


@torch.no_grad()
def figures() -> dict[str, float]:
    parts = [
        torch.nn.functional.normalize(network.eval()(images)) for images, _ in DataLoader(test, 64)
    ]
    return distap.evaluate(torch.cat(parts), test.targets)


before = figures()
sampler = RandomSampler(train, num_samples=batch * steps, replacement=True)
for images, labels in DataLoader(train, batch, sampler=sampler):
    loss = multistage(images, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print({name: f"{100 * before[name]:.1f} -> {100 * value:.1f}" for name, value in figures().items()})
