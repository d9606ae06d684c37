"""Add descriptors of earlier steps to the gallery (cross-batch memory, Wang et al. 2020)."""

import io
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from distap.errors import DistapError
from distap.ranking.gathered import Gathered


class CrossBatchMemory:
    """The newest `size` descriptors: queries are ranked against them too, but they get no gradient.

    Every rank remembers the same. If an image comes again, its newest descriptor replaces the older one.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size is {size}; it must not be below 0")
        self.size = size
        self.descriptors: Tensor | None = None  # (K, C), the newest last
        self.labels = torch.empty(0, 1, dtype=torch.int64)  # (K, L), from the finest level to the coarsest
        self.images = torch.empty(0, dtype=torch.int64)  # (K,) number of each image in its data set, -1 if unknown

    def __len__(self) -> int:
        return len(self.labels)

    def extend(self, gathered: Gathered) -> Gathered:
        """Return the batch with remembered descriptors of other images appended to its gallery."""
        if self.descriptors is None:
            return gathered
        descriptors, labels, _ = self._of_other_images(gathered)
        (_, here), (_, there) = gathered.gallery_levels.shape, labels.shape
        if here != there:
            raise DistapError(f"labels have {here} levels, but those of the memory's descriptors have {there}")
        return replace(
            gathered,
            gallery=torch.cat([gathered.gallery, descriptors.to(gathered.gallery)]),
            gallery_levels=torch.cat([gathered.gallery_levels, labels]),
        )

    def remember(self, gathered: Gathered) -> None:
        """Add a batch; drop the oldest descriptors."""
        if self.size == 0:
            return
        # The gathered batch is the same on all ranks, so their memories stay equal without a message.
        kept = [gathered.descriptors, gathered.levels, gathered.images]
        if self.descriptors is not None:
            kept = [torch.cat(rows) for rows in zip(self._of_other_images(gathered), kept, strict=True)]
        # Copies: a slice would keep all of the tensor that it was cut from.
        self.descriptors, self.labels, self.images = (rows[-self.size :].detach().clone() for rows in kept)

    def _of_other_images(self, gathered: Gathered) -> tuple[Tensor, Tensor, Tensor]:
        # Without the images of the batch, on its device: an image would be its own easiest positive, and the batch
        # has its newer descriptor. Images without a number (-1) are never the same.
        assert self.descriptors is not None
        images = self.images.to(gathered.images.device)
        other = ~(torch.isin(images, gathered.images) & (images >= 0))
        return self.descriptors.to(images.device)[other], self.labels.to(images.device)[other], images[other]

    def state_dict(self) -> dict[str, Tensor]:
        if self.descriptors is None:
            return {}
        return {"descriptors": self.descriptors, "labels": self.labels, "images": self.images}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state; take the newest descriptors if `size` is smaller now."""
        if state:
            newest = slice(max(0, len(state["labels"]) - self.size), None)
            self.descriptors = state["descriptors"][newest]
            self.labels, self.images = state["labels"][newest], state["images"][newest]

    def as_bytes(self) -> Tensor:
        """Return the state as a uint8 tensor, because safetensors, Accelerate and Hugging Face save only tensors."""
        buffer = io.BytesIO()
        torch.save(self.state_dict(), buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def load_bytes(self, state: Tensor) -> None:
        """Load a state that `as_bytes` returned."""
        self.load_state_dict(torch.load(io.BytesIO(state.cpu().numpy().tobytes()), weights_only=True))
