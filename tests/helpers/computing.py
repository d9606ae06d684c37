"""A rank that computes with OpenMP's threads, and differentiates."""

import torch

(torch.randn(1000, 1000, requires_grad=True) @ torch.randn(1000, 1000)).exp().sum().backward()
print("computed with", torch.get_num_threads(), "threads")
