"""A tower and its classes shared out: FSDP2 holds the parameters, and each rank some proxies.

torchrun --nproc-per-node 2 sharded.py photos/train
"""

import os
import sys

import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
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
pixels = v2.Compose([v2.Resize([64, 64]), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
train = ImageFolder(sys.argv[1], pixels)
network = timm.create_model("test_vit", num_classes=0, img_size=64).to(device)
for block in network.blocks:
    fully_shard(block)
fully_shard(network)  # first its blocks, then the network, then Multistage
multistage = distap.Multistage(
    network,
    loss="arc_face",
    micro_batch=16,
    reshard="pass",  # a block is freed after each pass through it
    shard_classes=True,
    classes=len(train.classes),
    dimensions=network.num_features,
)
optimizer = torch.optim.Adam(multistage.parameters(), lr=1e-3)

sampler = DistributedSampler(train, drop_last=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in DataLoader(train, 64, sampler=sampler):
        loss = multistage(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
if len(sys.argv) > 2:  # each rank writes its own parts; another number of ranks can read them
    parameters, moments = get_state_dict(multistage, optimizer)
    checkpoint.save({"model": parameters, "optimizer": moments}, checkpoint_id=sys.argv[2])
dist.destroy_process_group()
