"""Count what a network costs on any machine, with fake tensors: arithmetic, memory traffic and
activations.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from distap.config.recipe import Recipe
from distap.model.weights import RandomWeights
from distap.stages.replica import autocast
from distap.stages.sizes import SavedBytes
from distap.training.build import choose_trained, network_of
from distap.training.rank_memory import NetworkSize
from distap.world import World

# counted micro-batches; other sizes are taken from the line through these two
FEW = 2
MANY = 8


@dataclass(frozen=True)
class Line:
    """A cost in seconds, bytes or operations: a constant, and a share of each image or pair."""

    once: float
    each: float

    def __call__(self, count: float) -> float:
        return self.once + self.each * count


class NetworkCost(NamedTuple):
    """Cost of a network; a Line is a function of the images of a micro-batch."""

    dimensions: int  # C
    parameters: int
    trained: int  # parameters that require a gradient
    # FLOPs of a forward pass; a backward pass has twice as many, for inputs and for weights
    convolutions: Line
    products: Line  # other FLOPs of a forward pass
    # number of operations of a forward pass; a backward pass has about twice as many
    operations: Line
    forward_bytes: Line  # bytes that the operations of a forward pass read and write
    backward_bytes: Line
    working: Line  # bytes that the largest operation reads and writes
    graph: Line  # bytes that autograd keeps
    largest_block: int = 0  # parameters that are gathered at once, where the engine gathers blocks
    frozen_bytes: int = 4  # of a parameter that does not train


def network_cost(recipe: Recipe) -> NetworkCost:
    """Count the training passes of a recipe's network without its weights.

    A large one takes seconds.
    """
    world = World(device=torch.device("meta"))
    with torch.device("meta"):
        network = network_of(without_weights(recipe), world).train()
        choose_trained(recipe, network, world)
    size = NetworkSize.of(network)
    with FakeTensorMode():
        _move_to_fake_cpu(network)
        # PyTorch fills caches in the first pass, which is not counted
        _counts(network, recipe, FEW)
        counts_of_few, counts_of_many = (_counts(network, recipe, images) for images in (FEW, MANY))
    per_image = {
        name: (counts_of_many[name] - counts_of_few[name]) / (MANY - FEW) for name in counts_of_few
    }
    return NetworkCost(
        network.dimensions,
        size.parameters,
        size.trained,
        **{
            name: Line(max(counts_of_few[name] - FEW * per_image[name], 0.0), per_image[name])
            for name in counts_of_few
        },
        largest_block=size.largest_block,
        frozen_bytes=size.frozen_bytes,
    )


def without_weights(recipe: Recipe) -> Recipe:
    return changed(recipe, model={"weights": RandomWeights()}, step={"compile": False})


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    changes = {
        name: getattr(recipe, name).model_copy(update=keys) for name, keys in sections.items()
    }
    return recipe.model_copy(update=changes)


class _Traffic(TorchDispatchMode):
    """Record the bytes that each operation reads and writes; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)
            ]
            self.moved.append(sum(tensor.nbytes for tensor in tensors))
        return out


def _counts(network: nn.Module, recipe: Recipe, images: int) -> dict[str, int]:
    forward = _Traffic()
    backward = _Traffic()
    graph = SavedBytes(network)
    pixels = torch.zeros(
        images, 3, recipe.data.image_size, recipe.data.image_size, dtype=torch.uint8
    )
    with autocast(recipe.precision), FlopCounterMode(display=False) as flops, forward, graph:
        descriptors = network(pixels)
    with backward:
        descriptors.backward(torch.ones_like(descriptors))
    network.zero_grad()
    by_operation = flops.get_flop_counts()["Global"]
    convolutions = sum(
        number for operation, number in by_operation.items() if "convolution" in str(operation)
    )
    return {
        "convolutions": convolutions,
        "products": flops.get_total_flops() - convolutions,
        "operations": len(forward.moved),
        "forward_bytes": sum(forward.moved),
        "backward_bytes": sum(backward.moved),
        "working": max(forward.moved),
        "graph": graph.bytes,
    }


def _move_to_fake_cpu(network: nn.Module) -> None:
    """Replace meta tensors, to which autocast does not apply, with fake CPU tensors.

    `Module.to` cannot.
    """
    for module in network.modules():
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(
                module, name, nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            )
