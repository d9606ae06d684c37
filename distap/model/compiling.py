"""Compile a backbone with torch.compile."""

import os
import shutil

import torch
import torch._dynamo
from torch import Tensor, nn

from distap.errors import DistapError
from distap.model.network import RetrievalNetwork

MOST_GRAPHS = 64  # with and without gradients, in training and evaluation, of one image and of several, ...


def compile_backbone(network: RetrievalNetwork) -> None:
    """Replace a backbone by a compiled one, for micro-batches and images of any size.

    An engine may wrap the network before or after. Each graph is compiled when it is first needed, which takes
    minutes for a large network.
    """
    compiler = os.environ.get("CXX", "g++")
    if network.mean.device.type == "cpu" and not any(map(shutil.which, (compiler, "clang++", "c++"))):
        raise DistapError(f"step.compile needs a C++ compiler, and {compiler} was not found; install g++")
    # Graphs depend on this setting, which ranking changes for a while. Before it is first set, it reads the same but
    # counts as another one.
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    torch._dynamo.config.recompile_limit = MOST_GRAPHS  # beyond it torch would silently run uncompiled
    # Random numbers come from torch's own functions. The compiler's would depend on the graph, so describe and replay
    # would drop different elements. And a function of this module would be compiled with the shape checks of tests.
    call = lambda backbone, pixels: backbone(pixels)  # noqa: E731
    compiled = torch.compile(call, dynamic=True, options={"fallback_random": True})

    def run(backbone: nn.Module, pixels: Tensor) -> Tensor:
        try:
            features: Tensor = compiled(backbone, pixels)
            return features
        except torch._dynamo.exc.TorchDynamoException as error:
            first = str(error).strip().partition("\n")[0]
            raise DistapError(f"the backbone cannot be compiled, set step.compile to false: {first}") from error

    network.compiled = run
