"""A rank that computes with OpenMP's threads, and differentiates."""

import torch

from distap.processes.exit_statuses import record_outcome

(torch.randn(1000, 1000, requires_grad=True) @ torch.randn(1000, 1000)).exp().sum().backward()
print("computed with", torch.get_num_threads(), "threads")
record_outcome(0)
