"""Multistage in a loop of Hugging Face Accelerate, on any number of processes: `pip install
accelerate`.

accelerate launch --num_processes 2 --cpu accelerate_loop.py
"""

import timm
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import distap

torch.manual_seed(0)
labels = torch.arange(320) // 4
# a pattern a class, under noise
images = torch.randn(80, 3, 32, 32)[labels] + torch.randn(320, 3, 32, 32)
network = timm.create_model("test_resnet", num_classes=0)

accelerator = Accelerator(cpu=not torch.cuda.is_available())
loader = DataLoader(TensorDataset(images, labels), batch_size=64 // accelerator.num_processes)
optimizer = torch.optim.SGD(network.parameters(), lr=3.0, momentum=0.9)
network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
multistage = distap.Multistage(network, loss="ap_q", micro_batch=8, freeze_batchnorm=True)

for step, (pixels, classes) in enumerate(loader):
    loss = multistage(pixels, classes)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.7f}")
accelerator.end_training()
