"""A user's program, which no test runs: mypy checks it with the package, and would notice a type
that is lost.

What is wrong in it stands beside its error; mypy also tells if an error is none any more.
"""

from typing import assert_type

import torch
from torch import Tensor, nn

from distap import Multistage, evaluate, load, rank

multistage = Multistage(nn.Sequential(nn.Flatten(), nn.Linear(48, 8)), loss="ap_q", micro_batch=4)
images = torch.randn(8, 3, 4, 4)
labels = torch.arange(8) // 2

assert_type(multistage(images, labels), Tensor)
assert_type(evaluate(torch.eye(8), labels), dict[str, float])
assert_type(rank(torch.eye(8), labels).gradient, Tensor)
assert_type(load("runs/mine").describe(["photo.jpg"]), Tensor)

multistage(images, label=labels)  # type: ignore[call-arg]
load(3)  # type: ignore[arg-type]
Multistage(nn.Flatten(), micro_batch="8")  # type: ignore[arg-type]
evaluate(torch.eye(8), label=labels)  # type: ignore[call-arg]
load("runs/mine", devise="cpu")  # type: ignore[call-arg]
