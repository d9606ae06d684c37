"""The same on several ranks, with DistributedDataParallel: the batch is that of all ranks.

torchrun --nproc-per-node 2 ddp.py photos/train
"""

import os
import sys

import timm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import distap

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if torch.cuda.is_available()
    else torch.device("cpu")
)
pixels = v2.Compose([v2.RandomResizedCrop(64), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
train = ImageFolder(sys.argv[1], pixels)
network = DistributedDataParallel(timm.create_model("test_resnet", num_classes=0).to(device))
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
multistage = distap.Multistage(network, loss="smooth_ap", micro_batch=16, freeze_batchnorm=True)

sampler = DistributedSampler(train, drop_last=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in DataLoader(train, 64, sampler=sampler):
        loss = multistage(images, labels)  # micro-batches go to the device one by one
        loss.backward()  # gradients are reduced once
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
