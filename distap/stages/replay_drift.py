"""Watch what the three stages rest on: an image's descriptor depends on the image and the random state alone."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distap.errors import DistapError


def mixes_images(network: nn.Module) -> str | None:
    """Say why an image's descriptor depends on its micro-batch in this network; None if it does not."""
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


def drift(again: Float[Tensor, "n C"], before: Float[Tensor, "n C"]) -> Float[Tensor, ""]:
    """Return the greatest difference between two descriptors of an image."""
    difference = (again - before).abs().amax(dim=1)
    # An image whose first descriptor was not finite has been blanked since.
    return torch.where(before.isfinite().all(dim=1), difference, 0).max().double()


def drift_error(worst: float, limit: float, step: int) -> DistapError:
    """The error for a drift above its limit; `step` counts from 1."""
    return DistapError(
        f"step {step}: replay drift {worst:.2g} exceeds {limit:g}: describe and replay gave different descriptors "
        "for the same image, so the gradient would be wrong. Usual causes: randomness that torch's generators do "
        "not control, BatchNorm whose statistics change within the step, a layer that mixes the images of a "
        "micro-batch, or a precision too low for the limit (replay.max_drift)"
    )
