"""Check that a descriptor depends on its image and the random state alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize

from distap.errors import DistapError

# relative difference of an image's descriptors in two cuts; rounding is far below
LEAST_MIXING = 1e-2


def default_drift(device: torch.device, is_float32: bool) -> float:
    """Return the tolerated difference between two descriptors of an image, if the user sets none.

    Exact networks differ by rounding alone: of micro-batches of other sizes, TF32, or autocast.
    """
    if not is_float32:
        return 0.1
    try:
        rounds = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the precision is set by torch's newer names, and may be anything
        rounds = True
    return 1e-3 if rounds else 1e-4


def why_cut_matters(network: nn.Module) -> str | None:
    """Return which layer makes a descriptor depend on its micro-batch; None if none is known.

    If there is one, replay has to cut the batch into the same micro-batches as describe.
    """
    for name, module in network.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.SyncBatchNorm):
            raise DistapError(
                "network.mixes_images",
                f"{name} is a SyncBatchNorm, whose gradient over ranks a replay cannot reproduce",
            )
        if isinstance(module, _BatchNorm):
            return f"{name} normalises by the statistics of its micro-batch"
        # timm's DropPath and torch's Dropout, by what they have in common.
        probability = getattr(module, "drop_prob", getattr(module, "p", 0))
        if (
            "drop" in type(module).__name__.lower()
            and isinstance(probability, float)
            and probability > 0
        ):
            return f"{name} drops at random, drawing for the whole micro-batch"
    return None


def normalises_by_batch(network: nn.Module) -> bool:
    """Return whether a BatchNorm layer normalises by micro-batch: replay then has to cut alike."""
    return any(isinstance(layer, _BatchNorm) and layer.training for layer in network.modules())


def refuse_mixing(
    describe: Callable[[int, int], Tensor],
    network: nn.Module,
    count: int,
    agreed: Callable[[bool], bool] = bool,
) -> None:
    """Describe a few images in two cuts, and raise a DistapError if an image's descriptor differs.

    Args:
        describe: takes a number of images and a seed, and returns the descriptors of the first so
            many images, described together with torch's random state at this seed.
        count: images of the larger cut, at least 2.
        agreed: whether something holds on all ranks, which then make the same trials.
    """

    def agrees(images: int, seed: int = 0) -> bool:
        """Return whether this cut gives the same descriptors as that of `count` with seed 0."""
        # A NaN tells nothing: the step itself leaves descriptors that are not finite out, and logs
        # it.
        descriptors = describe(images, seed).double().nan_to_num(0, 0, 0)
        expected = describe(count, 0)[:images].double().nan_to_num(0, 0, 0)
        difference = (descriptors - expected).abs().max()
        limit = LEAST_MIXING * expected.abs().max().clamp(min=1e-30)
        return agreed(not bool(difference > limit))

    # Descriptors may differ between cuts because the network mixes images, which is refused, or
    # because it draws other random numbers in another cut, which does no harm: replay then cuts as
    # describe did, and draws the same. Trials tell them apart, in this order:
    #
    #     images       seed   mode         what follows
    #     count - 1    0      as it is     agrees: return, the cut does not matter
    #     count        0      as it is     differs: return, no seed repeats it; the drift shows that
    #     count        1      as it is     agrees: refuse, it draws nothing, so it mixes
    #     count        1      evaluation   differs: return, it draws even here; only the drift tells
    #     count - 1    0      evaluation   agrees: return, it was the draws; differs: refuse
    if agrees(count - 1) or not agrees(count):
        return
    if not agrees(count, seed=1):
        with evaluating(network):
            if not agrees(count, seed=1) or agrees(count - 1):
                return
    raise DistapError(
        "network.mixes_images",
        f"the network describes the same images differently in micro-batches of {count - 1} and"
        f" {count}: it mixes the images of a micro-batch (such as a mean or an attention over them,"
        " or their statistics), so the gradient of the whole batch cannot be found micro-batch by"
        " micro-batch",
    )


@contextmanager
def evaluating(network: nn.Module, kind: type = nn.Module) -> Iterator[None]:
    """Put layers of this kind into evaluation mode, and back."""
    # Not by `eval()`: layers may do more in it, such as merging an adapter into its base.
    training = [
        module for module in network.modules() if module.training and isinstance(module, kind)
    ]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def without_caches() -> Iterator[None]:
    """Compute parametrised weights anew in each pass, also in torch's `parametrize.cached()`."""
    # What is cached in describe has no graph, and would have none in replay; what is cached in
    # replay has one that the first micro-batch's backward pass frees.
    enabled = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = enabled


class SavedBuffers:
    """A copy of the buffers of layers in training mode, such as counters and running estimates.

    A pass may move them: spectral normalisation moves the vectors from which it computes its
    weights. Every micro-batch of a step, in describe and in replay, begins from the buffers of
    before the step. So all images of a batch meet the same weights, as in one pass over the whole
    batch, and the buffers move once per step.
    """

    def __init__(self, network: nn.Module) -> None:
        self._saved = [
            (layer, name, buffer, buffer.clone())
            for layer in network.modules()
            if layer.training
            for name, buffer in layer.named_buffers(recurse=False)
            if buffer.layout is torch.strided
        ]

    def restore(self, statistics: bool = True) -> None:
        """Restore all buffers, changed or not, because a comparison would wait for the device.

        Without `statistics`, leave those of BatchNorm and InstanceNorm as they are: no descriptor
        depends on them in training mode, and they gather what each micro-batch adds.
        """
        for layer, name, tensor, before in self._saved:
            if not statistics and isinstance(layer, _NormBase):
                continue
            if tensor.shape != before.shape:
                tensor = before.clone()
            # Nothing can write into an expanded tensor, so it has not changed.
            if not is_expanded(tensor):
                # By `data`: autograd would refuse a graph that holds the buffer, though it does not
                # use its values.
                tensor.data.copy_(before)
            setattr(layer, name, tensor)


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `Tensor.expand`."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def make_writable(network: nn.Module) -> None:
    """Give each element of expanded parameters and buffers memory, so that checkpoints can load."""
    for module in network.modules():
        for parameter in filter(is_expanded, module.parameters(recurse=False)):
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        for name, buffer in module.named_buffers(recurse=False):
            if is_expanded(buffer):
                setattr(module, name, buffer.clone(memory_format=torch.contiguous_format))


def drift(again: Float[Tensor, "n C"], before: Float[Tensor, "n C"]) -> Float[Tensor, ""]:
    """Return the greatest difference between an image's descriptors in describe and in replay."""
    difference = (again - before).abs().amax(dim=1)
    # An image whose first descriptor was not finite has been blanked since.
    return torch.where(before.isfinite().all(dim=1), difference, 0).max().double()


def drift_error(worst: float, limit: float, step: int) -> DistapError:
    """Return the error for a drift above its limit; `step` counts from 1."""
    return DistapError(
        "run.replay_drift",
        f"step {step}: replay drift {worst:.2g} exceeds {limit:g}: describe and replay gave"
        " different descriptors for the same image, so the gradient would be wrong. Usual causes:"
        " randomness that torch's generators do not control, parameters that moved between the two"
        " (optimizer.step() before backward), layers whose state changes in each pass, or a"
        " precision too low for the limit (max_drift)",
    )
