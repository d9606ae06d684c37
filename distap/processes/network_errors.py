"""Tell errors of the network from others, and shorten what torch says of them."""

import re

import torch.distributed as dist

# gloo, NCCL and the store raise plain RuntimeErrors, which these marks tell apart.
OF_THE_NETWORK = ("/gloo/", "NCCL error", "NCCL communicator", "Connection ", "Broken pipe", "imed out")


def is_of_the_network(error: Exception) -> bool:
    """Tell whether torch raised this error because a rank or the network failed."""
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in OF_THE_NETWORK)


def first_line(error: Exception) -> str:
    """Strip torch's source location and gloo's advice."""
    line = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", line)[:300]
