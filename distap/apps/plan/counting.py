"""What a network does to images, counted an operation at a time without computing anything.

The network is built without memory and runs on tensors that have a shape, a dtype and no content, so a ResNet-101 at
800 x 800 pixels is counted in seconds on any machine. Autocast, activation checkpointing and frozen layers are in the
counts, since it is PyTorch's own dispatch and autograd that run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from distap.apps.plan.inputs import Line, NetworkFacts, Operation, Pass
from distap.engine.precision import Precision, PrecisionName
from distap.stages.sizes import SavedBytes

FEW, MANY = 2, 8  # images that are counted with; what lies between and beyond is on the line through both


class Seen(NamedTuple):
    """An operation on some images."""

    name: str
    flops: int
    moved: int  # bytes


def count(build: Callable[[], nn.Module], image_size: int, precision: PrecisionName = "float32") -> NetworkFacts:
    """Arithmetic, memory traffic and activations of a network with `dimensions`, in training.

    Args:
        build: the network; called where new tensors have no memory.
        image_size: width and height, pixels.
        precision: what it computes in.
    """
    with torch.device("meta"):
        network = build().train()
    with FakeTensorMode():
        _without_content(network)
        _counted(network, FEW, image_size, precision)  # fills PyTorch's caches, whose filling would be counted
        few, many = (_counted(network, images, image_size, precision) for images in (FEW, MANY))
    parameters = list(network.parameters())
    return NetworkFacts(
        dimensions=int(network.dimensions),  # type: ignore[arg-type]
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        image_bytes=3 * image_size**2,
        forward=_by_images(few.forward, many.forward),
        backward=_by_images(few.backward, many.backward),
        graph=_line(few.graph, many.graph),
        working=_line(few.working, many.working),
    )


@dataclass(frozen=True)
class _Counted:
    """A forward and a backward pass, and the bytes that autograd keeps between them."""

    forward: list[Seen]
    backward: list[Seen]
    graph: int

    @property
    def working(self) -> int:
        """Bytes of the largest operation without a graph."""
        return max(seen.moved for seen in self.forward)


def _counted(network: nn.Module, images: int, image_size: int, precision: PrecisionName) -> _Counted:
    pixels = torch.zeros(images, 3, image_size, image_size, dtype=torch.uint8)
    forward, backward, graph = _Operations(), _Operations(), SavedBytes(network)
    with Precision(precision).autocast(), forward, graph:
        descriptors = network(pixels)
    with backward:
        descriptors.backward(torch.ones_like(descriptors))
    network.zero_grad()
    return _Counted(forward.seen, backward.seen, graph.bytes)


class _Operations(TorchDispatchMode):
    """Writes down what PyTorch is asked to do, but for what only looks at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if moved:
                self.seen.append(Seen(str(func), _flops(func, args, kwargs or {}, out), moved))
        return out


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if func.overloadpacket is torch.ops.aten.convolution_backward:
        # PyTorch's own formula forgets groups, so that depthwise convolutions would count a hundredfold.
        gradient, images, weight, *_, transposed, _, _, wanted = args
        once = conv_flop_count(images.shape, weight.shape, gradient.shape, transposed)
        return int(once * (int(wanted[0]) + int(wanted[1])))
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def _without_content(network: nn.Module) -> None:
    """Put tensors of the present fake mode, on the CPU as far as PyTorch knows, in place of those on meta."""

    def replaced(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(replaced(parameter), parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, replaced(buffer))


def _by_images(few: list[Seen], many: list[Seen]) -> Pass:
    """The operations, each as a line over the images."""
    if [seen.name for seen in few] != [seen.name for seen in many]:
        # Something was done another number of times; only the sums can be compared.
        few, many = ([_sum(operations)] for operations in (few, many))
    return tuple(
        Operation(_line(one.flops, other.flops), _line(one.moved, other.moved), "convolution" in one.name)
        for one, other in zip(few, many, strict=True)
    )


def _sum(operations: list[Seen]) -> Seen:
    return Seen("all", sum(seen.flops for seen in operations), sum(seen.moved for seen in operations))


def _line(few: float, many: float) -> Line:
    each = (many - few) / (MANY - FEW)
    return Line(max(few - FEW * each, 0.0), each)
