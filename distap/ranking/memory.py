"""Descriptors of earlier steps as more of a gallery (cross-batch memory, Wang et al. 2020)."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distap.ranking.gathered import Gathered


class CrossBatchMemory:
    """The newest `size` descriptors: queries are ranked against them too, but no gradient flows to them.

    Every rank remembers the same. An image that is met again is remembered as it was last.

    Args:
        size: number of descriptors that are remembered.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size is {size}; it must not be below 0")
        self.size = size
        self.descriptors: Float[Tensor, "K C"] | None = None
        self.labels: Int64[Tensor, " K"] = torch.empty(0, dtype=torch.int64)
        self.images: Int64[Tensor, " K"] = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def extend(self, gathered: Gathered) -> Gathered:
        """The batch with what is remembered behind it in the gallery, but for the batch's own images."""
        if self.descriptors is None:
            return gathered
        self._move_to(gathered.gallery.device)
        other = ~self._again(gathered.images)
        return replace(
            gathered,
            gallery=torch.cat([gathered.gallery, self.descriptors[other].to(gathered.gallery)]),
            gallery_labels=torch.cat([gathered.gallery_labels, self.labels[other]]),
        )

    def remember(self, gathered: Gathered) -> None:
        """Add a batch, and forget what is too old."""
        if self.size == 0:
            return
        descriptors, labels, images = gathered.descriptors, gathered.labels, gathered.images
        if self.descriptors is not None:
            self._move_to(descriptors.device)
            other = ~self._again(images)
            descriptors = torch.cat([self.descriptors[other], descriptors])
            labels, images = torch.cat([self.labels[other], labels]), torch.cat([self.images[other], images])
        # Copies: a slice would keep all that it was cut from.
        self.descriptors = descriptors[-self.size :].detach().clone()
        self.labels, self.images = labels[-self.size :].clone(), images[-self.size :].clone()

    def _move_to(self, device: torch.device) -> None:
        """Where the batch is: what was restored may be elsewhere."""
        if self.descriptors is not None:
            self.descriptors = self.descriptors.to(device)
        self.labels, self.images = self.labels.to(device), self.images.to(device)

    def _again(self, images: Int64[Tensor, " B"]) -> Tensor:
        return torch.isin(self.images, images) & (self.images >= 0)

    def state_dict(self) -> dict[str, Tensor]:
        """What `load_state_dict` takes; nothing where nothing is remembered."""
        if self.descriptors is None:
            return {}
        return {"descriptors": self.descriptors, "labels": self.labels, "images": self.images}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember what was saved, the newest of it where the size is smaller now."""
        if not state:
            return
        newest = slice(max(0, len(state["labels"]) - self.size), None)
        self.descriptors = state["descriptors"][newest]
        self.labels, self.images = state["labels"][newest], state["images"][newest]
