"""A network on this rank, for the three stages; one class per way of sharing it between ranks.

    Replica          a whole copy on every rank, trained in place: gradients are all-reduced once
                     per step
    CallersReplica   a whole copy that the caller owns: autograd gets its gradients as if the batch
                     had been one pass
    FSDPReplica      distap/stages/fsdp.py: every rank holds a shard of every parameter
    ZeroReplica      distap/stages/deepspeed.py: DeepSpeed shares out gradients and parameters

The contract of all: parameters move along the sum over ranks of what `backward` was given, because
ranking has already divided by the global number of queries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from distap.errors import DistapError
from distap.stages.bunches import bunches
from distap.world import World

# Of a message that sums gradients over ranks. It is a copy, so a network of billions of parameters
# needs no more memory for its gradients than these bytes beside them.
BUCKET_BYTES = 256 * 2**20


class Replica:
    """A network with the same parameters on every rank; `backward` adds to the parameters' `.grad`.

    Args:
        network: the network, on its device.
        forward: images to descriptors (n, C), float32 or wider; None calls the network.
    """

    # each micro-batch of replay communicates, so all ranks must replay the same number of them
    lockstep = False
    describes_in_lockstep = False  # so does each micro-batch of describe
    survives_backward = True  # a backward pass that ran out of memory can be given up
    keeps_graphs = True  # `forward` may be called several times before the backward passes

    def __init__(
        self, network: nn.Module, world: World, forward: Callable[[Any], Tensor] | None = None
    ) -> None:
        self.network = network
        self.world = world
        self._forward = forward or network

    def describing(self) -> AbstractContextManager[None]:
        """Enclose describe; unless `describes_in_lockstep`, parameters are `whole` inside."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Enclose an evaluation: parameters are whole, and no rank needs others to describe."""
        return self.describing()

    def replaying(self) -> AbstractContextManager[None]:
        """Enclose the replay of a step, in which gradients are computed."""
        return nullcontext()

    def forward(self, images: Any) -> Tensor:
        """Describe images. Without autograd, call it inside `describing`."""
        return self._forward(images)

    def release(self) -> None:
        """Return parameters to the form that the optimiser and checkpoints expect."""

    def backward(self, descriptors: Tensor, gradient: Tensor, is_last: bool) -> None:
        """Backpropagate dL/d descriptors, (n, C), into parameter gradients.

        `is_last` marks the last pass of a step.
        """
        torch.autograd.backward(descriptors, gradient)

    def reduce(self) -> None:
        """Sum the gradients over ranks after a step's last backward pass."""
        # No wrapper reduces in a backward pass: a rank that runs out of memory in one can start its
        # replay again while the others wait here.
        if self.world.size == 1:
            return
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        gradients = [parameter.grad for parameter in trained]
        sums = summed(self.world, gradients, trained)
        for parameter, gradient in zip(trained, sums, strict=True):
            parameter.grad = gradient

    def discard(self) -> None:
        """Clear the gradients, because the step is skipped or its replay restarts."""
        self.network.zero_grad()


class CallersReplica(Replica):
    """The caller's network, possibly wrapped in DistributedDataParallel.

    Gradients of micro-batches are summed next to the parameters, where no hook of a wrapper or of
    the caller sees them, and given to autograd once. With `sums`, they are summed over the ranks
    first; otherwise the caller's wrapper does that.
    """

    def __init__(
        self,
        network: nn.Module,
        world: World,
        forward: Callable[[Any], Tensor],
        *,
        trained: Sequence[Tensor],
        sums: bool,
    ) -> None:
        super().__init__(network, world, forward)
        self._sums = sums
        self.inputs = list(trained)
        self.gradients: list[Tensor | None] = [None] * len(self.inputs)  # for each of `inputs`

    def replaying(self) -> AbstractContextManager[None]:
        return without_hooks(self.inputs)

    def backward(self, descriptors: Tensor, gradient: Tensor, is_last: bool) -> None:
        # Not `backward`, which would fill `.grad` and run the hooks of a wrapper once for each
        # micro-batch.
        gradients = torch.autograd.grad(descriptors, self.inputs, gradient, allow_unused=True)
        for number, addend in enumerate(gradients):
            total = self.gradients[number]
            if total is not None and addend is not None:
                total += addend
            elif addend is not None:
                # A copy to add to: autograd may give one tensor to several parameters, or one that
                # repeats a number.
                self.gradients[number] = addend.clone()

    def reduce(self) -> None:
        if self._sums:
            self.gradients = summed(self.world, self.gradients, self.inputs)

    def discard(self) -> None:
        self.gradients = [None] * len(self.inputs)


class ReplacedForward(nn.Module):
    """A network with another function as forward pass, for wrappers such as DDP or DeepSpeed."""

    def __init__(self, network: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network = network
        self._replacement = replacement

    def forward(self, value: Tensor) -> Tensor:
        return self._replacement(value)


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Hide hooks of `Tensor.register_hook` from micro-batches: they are for the whole gradient."""
    hidden = {
        parameter: parameter._backward_hooks
        for parameter in parameters
        if parameter._backward_hooks
    }
    for parameter in hidden:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hidden.items():
            parameter._backward_hooks = hooks


def refuse_exchanged(network: nn.Module, trained: Mapping[str, Tensor]) -> None:
    """Raise a DistapError unless the parameters that described the images are the network's own."""
    # Others would get the gradient, or none would, and nothing else would tell: where their values
    # are the same, the descriptors do not drift.
    present = dict(network.named_parameters())
    for name, parameter in trained.items():
        if present.get(name) is not parameter or not parameter.requires_grad:
            raise DistapError(
                "network.exchanged_parameter",
                f"{name} is another parameter in backward() than when the images were described, or"
                " was frozen since, so its gradient would be lost: keep the network's parameters"
                " until backward() has run. torch.func.functional_call lends a module other"
                " parameters for one call only: copy their values into the network's own instead",
            )


def refuse_hooks(network: nn.Module) -> None:
    """Raise a DistapError if a parameter's hook would act on each micro-batch's gradient."""
    for name, parameter in network.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise DistapError(
                "network.hooked_parameter",
                f"{name} has a hook on its gradient, which would act on each micro-batch's part of"
                " it; remove the hook, or train in a loop of your own with distap.Multistage,"
                " where it acts once, on the whole",
            )


def summed(
    world: World, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Sum gradients over ranks, in messages of one dtype and of up to BUCKET_BYTES.

    A tensor that is larger has a message of its own. One missing on all ranks stays None.
    """
    # A small network has hundreds of tensors, and each message costs its own latency; a message of
    # all gradients would be as large as the network. The counts travel along, since an optimiser
    # leaves a parameter without gradient alone, but moves one of zeros by its moments and its
    # decay: | gradient 1 | gradient 2 | ... | how many ranks have 1, 2, ... |
    sums = list(gradients)
    for numbers in _buckets(parameters):
        of_bucket = _summed_at_once(
            world,
            [gradients[number] for number in numbers],
            [parameters[number] for number in numbers],
        )
        for number, gradient in zip(numbers, of_bucket, strict=True):
            sums[number] = gradient
    return sums


def _summed_at_once(
    world: World, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Sum gradients in one message, which is forgotten before the next one is made."""
    addends = [
        torch.zeros_like(like) if gradient is None else gradient
        for gradient, like in zip(gradients, parameters, strict=True)
    ]
    is_there = [gradient is not None for gradient in gradients]
    counts = torch.tensor(is_there, dtype=addends[0].dtype, device=addends[0].device)
    message = torch.cat([*(addend.flatten() for addend in addends), counts])
    lengths = [*map(torch.numel, addends), len(addends)]
    *wholes, counts = world.sum(message).split(lengths)
    # Copied back, so that the gradient keeps the memory layout of its parameter.
    return [
        addend.copy_(whole.view_as(addend)) if count else None
        for addend, whole, count in zip(addends, wholes, counts.tolist(), strict=True)
    ]


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the numbers of the parameters whose gradients share a message."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        numbers = [number for number, like in enumerate(parameters) if like.dtype == dtype]
        yield from bunches(numbers, lambda number: parameters[number].nbytes, BUCKET_BYTES)


def autocast(precision: str, device_type: str = "cpu") -> AbstractContextManager[None]:
    """Compute convolutions and matrix products in this dtype inside; `float32` changes nothing.

    Do not enter it twice: it caches casts of weights, which are stale after the next update.
    """
    # Without a dtype a float64 network stays float64.
    dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def computing_in(precision: str, network: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return a function that describes images (n, 3, height, width) in this precision."""

    def describe(images: Tensor) -> Tensor:
        with autocast(precision, images.device.type):
            return network(images)

    return describe


def world_of(network: nn.Module, group: dist.ProcessGroup | None) -> World:
    """Return the ranks of a batch: `group`, those over which the wrapper averages, or all."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=device)
    # Gradients and batches have to be of the same ranks.
    group = group or _group_of(network)
    return World(dist.get_rank(group), dist.get_world_size(group), device=device, group=group)


def _group_of(network: nn.Module) -> dist.ProcessGroup | None:
    if isinstance(network, DistributedDataParallel):
        return network.process_group
    for parameter in network.parameters():
        if isinstance(parameter, DTensor):
            # On a mesh of several dimensions, as of hybrid sharding, each rank has its own images:
            # the batch is of all.
            mesh = parameter.device_mesh
            return mesh.get_group() if mesh.ndim == 1 else None
    return None


def refuse_unusable(network: nn.Module, freezes_batchnorm: bool) -> None:
    """Raise a DistapError that names a part of a network that would make the gradient wrong."""
    for name, module in network.named_modules():
        if name and isinstance(module, FSDPModule) and not isinstance(network, FSDPModule):
            raise DistapError(
                "network.partly_sharded",
                f"{name} is sharded by fully_shard, but not the whole network; call fully_shard on"
                " it too",
            )
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise DistapError(
                "network.wrapped_inside",
                f"{name or 'the network'} is wrapped by {type(module).__name__}; wrap the whole"
                " network by DistributedDataParallel or fully_shard",
            )
        if isinstance(module, _BatchNorm):
            _refuse_batch_statistics(name, module, freezes_batchnorm)


def _refuse_batch_statistics(name: str, module: _BatchNorm, freezes_batchnorm: bool) -> None:
    if module.running_mean is None:
        raise DistapError(
            "network.mixes_images",
            f"{name} is a BatchNorm layer without running statistics, which mixes images",
        )
    if module.training and not freezes_batchnorm:
        raise DistapError(
            "network.mixes_images",
            f"{name} is a BatchNorm layer in training mode, so a descriptor would depend on its"
            " micro-batch; pass freeze_batchnorm=True, or set it to evaluation mode"
            " (module.eval())",
        )
