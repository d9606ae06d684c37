"""Check the assumption of the three stages: a descriptor depends only on its image and the random state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distap.errors import DistapError


def default_drift(device: torch.device, is_float32: bool) -> float:
    """Return the default limit of the difference between two descriptors of an image.

    Exact networks have none. What is allowed is rounding: of micro-batches of other sizes, TF32, or autocast.
    """
    if not is_float32:
        return 0.1
    return 1e-3 if device.type == "cuda" and torch.backends.cudnn.allow_tf32 else 1e-4


def mixes_images(network: nn.Module) -> str | None:
    """Return why a descriptor depends on its micro-batch in this network; None if no layer is known to mix images."""
    for name, module in network.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.SyncBatchNorm):
            raise DistapError(f"{name} is a SyncBatchNorm, whose gradient over ranks a replay cannot reproduce")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name} normalises by the statistics of its micro-batch"
        # timm's DropPath and torch's Dropout, by what they have in common.
        probability = getattr(module, "drop_prob", getattr(module, "p", 0))
        if "drop" in type(module).__name__.lower() and isinstance(probability, float) and probability > 0:
            return f"{name} drops at random, drawing for the whole micro-batch"
    return None


def refuse_mixing(describe: Callable[[int, int], Tensor], network: nn.Module, count: int, limit: float) -> None:
    """Describe a few images in two cuts; raise a DistapError if an image's descriptor differs.

    Args:
        describe: maps a number n of images and a seed to the descriptors of the first n images.
        count: number of images in the larger cut, at least 2.
        limit: greatest difference, relative to the largest number of the descriptors.
    """

    def agree() -> bool:
        return _agree(describe(count - 1, 0), describe(count, 0), limit)

    if agree():
        return
    if not _agree(describe(count, 0), describe(count, 0), limit):
        return  # no random state brings the same descriptors back, which the drift between the stages will show
    if not _agree(describe(count, 0), describe(count, 1), limit):
        # The network draws at random, and other numbers in another cut. Without that, it must agree.
        with _evaluating(network):
            if agree():
                return
    raise DistapError(
        f"the network describes the same images differently in micro-batches of {count - 1} and {count}: it mixes "
        "the images of a micro-batch (such as a mean or an attention over them, or their statistics), so the "
        "gradient of the whole batch cannot be found micro-batch by micro-batch"
    )


def _agree(few: Tensor, more: Tensor, limit: float) -> bool:
    few, more = few.double(), more[: len(few)].double()
    # Descriptors that are not finite are left out of the step, which says so.
    return not bool((few - more).abs().max() > limit * more.abs().max().clamp(min=1e-30))


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class MovingBuffers:
    """Buffers of layers in training mode, such as counters and running estimates, saved before a stage.

    Describe and replay each run the network, so such buffers would move twice per step, and replay would compute with
    other ones than describe.
    """

    def __init__(self, network: nn.Module) -> None:
        layers = (module for module in network.modules() if module.training)
        buffers = (buffer for layer in layers for buffer in layer.buffers(recurse=False))
        self._before = [(buffer, buffer.clone()) for buffer in buffers]

    def restore(self) -> None:
        """Restore the buffers that changed since the stage began."""
        for now, before in self._before:
            if not torch.equal(now, before):
                # By `data`: kept graphs hold some buffers without using them, and would refuse what has changed.
                now.data.copy_(before)


def drift(again: Float[Tensor, "n C"], before: Float[Tensor, "n C"]) -> Float[Tensor, ""]:
    """Return the greatest difference between two descriptors of one image."""
    difference = (again - before).abs().amax(dim=1)
    # An image whose first descriptor was not finite has been blanked since.
    return torch.where(before.isfinite().all(dim=1), difference, 0).max().double()


def drift_error(worst: float, limit: float, step: int) -> DistapError:
    """Return the error for a drift above its limit; `step` counts from 1."""
    return DistapError(
        f"step {step}: replay drift {worst:.2g} exceeds {limit:g}: describe and replay gave different descriptors "
        "for the same image, so the gradient would be wrong. Usual causes: randomness that torch's generators do "
        "not control, parameters that moved between the two (optimizer.step() before backward), layers whose state "
        "changes in each pass, or a precision too low for the limit (max_drift)"
    )
