"""A loss of pytorch-metric-learning over a batch larger than memory: `pip install
pytorch-metric-learning`.
"""

import timm
import torch
from pytorch_metric_learning.losses import MultiSimilarityLoss

import distap

torch.manual_seed(0)
network = timm.create_model("test_resnet", num_classes=0).eval()
multistage = distap.Multistage(network, MultiSimilarityLoss(), micro_batch=16)
images = torch.randn(64, 3, 64, 64)
labels = torch.arange(64) // 4
loss = multistage(images, labels)
loss.backward()
print(f"loss {loss.item():.4f}")
