"""Compile a backbone with torch.compile, in a known number of graphs."""

import os
import shutil
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch._dynamo
from torch import Tensor, nn

from distap.errors import DistapError
from distap.model.network import RetrievalNetwork

_NO_LIMIT = 2**16  # torch counts the graphs of all networks in a process together


def compile_backbone(network: RetrievalNetwork, sizes: Sequence[int]) -> None:
    """Replace a backbone by a compiled one, for training, and for evaluation on images of the same size.

    An engine may wrap the network before or after. Each graph is compiled when it is first needed, which takes
    minutes for a large network. Micro-batches are padded to one of the `sizes`, those of the full ones, or to a half,
    a quarter and so on of one, so that there are few graphs.
    """
    network.require_frozen("step.compile", "would also normalise by the images that pad a micro-batch")
    compiler = os.environ.get("CXX", "g++")
    if network.mean.device.type == "cpu" and not any(map(shutil.which, (compiler, "clang++", "c++"))):
        raise DistapError(f"step.compile needs a C++ compiler, and {compiler} was not found; install g++")
    network.compiled = CompiledBackbone(sizes)


class CompiledBackbone:
    """Run compiled backbones, with one graph per size of micro-batch, with and without gradients.

    Random numbers come from torch's own functions. The compiler's would depend on the graph, so describe and replay
    would drop different elements.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        # Graphs depend on this setting, which ranking changes for a while. Before it is first set, it reads the same
        # but counts as another one.
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
        # A function of this module would be compiled together with the shape checks of the tests.
        call = lambda backbone, pixels: backbone(pixels)  # noqa: E731
        self._function = torch.compile(call, dynamic=False, options={"fallback_random": True})
        self._sizes = sorted({size >> halvings for size in sizes for halvings in range(size.bit_length())})
        self._warm: set[tuple[Any, ...]] = set()
        self._trained_on: set[torch.Size] = set()

    def __call__(self, backbone: nn.Module, pixels: Tensor) -> Tensor:
        if backbone.training:
            self._trained_on.add(pixels.shape[1:])
        elif pixels.shape[1:] not in self._trained_on:  # whole images would need a graph for each of their sizes
            features: Tensor = backbone(pixels)
            return features
        n = len(pixels)
        padded = self.padded_size(n)
        if padded > n:
            # Repeat real images, because made-up ones might overflow.
            pixels = pixels[torch.arange(padded, device=pixels.device) % n]
        kind = _kind(pixels, backbone.training)
        # A graph that is needed again has to be there: torch would compile it anew, or silently run uncompiled.
        stance: Literal["fail_on_recompile", "default"] = "fail_on_recompile" if kind in self._warm else "default"
        try:
            with (
                torch.compiler.set_stance(stance),
                torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT),
            ):
                features = self._function(backbone, pixels)
        except RuntimeError as error:
            if "fail_on_recompile" in str(error):
                why = str(error).partition("guard failure(s):")[2].strip() or error
                raise DistapError(
                    f"the backbone would have to be compiled again for micro-batches of {tuple(pixels.shape)}, which "
                    f"it has seen before; set step.compile to false. What changed since: {why}"
                ) from error
            if isinstance(error, torch._dynamo.exc.TorchDynamoException):
                first = str(error).strip().partition("\n")[0]
                raise DistapError(f"the backbone cannot be compiled, set step.compile to false: {first}") from error
            raise
        self._warm.add(kind)
        return features[:n]

    def padded_size(self, images: int) -> int:
        """Return the number of images to which a micro-batch is padded."""
        return next((size for size in self._sizes if size >= images), images)


def _kind(pixels: Tensor, training: bool) -> tuple[Any, ...]:
    """Return everything that requires a graph of its own when it changes."""
    device = pixels.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    passes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    settings = (training, autocast, *passes, torch.get_num_threads(), torch.get_float32_matmul_precision())
    return (*pixels.shape, *pixels.stride(), pixels.dtype, pixels.device, *settings)
