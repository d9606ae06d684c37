"""Add descriptors of earlier steps to the gallery (cross-batch memory, Wang et al. 2020)."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from distap.errors import DistapError
from distap.ranking.gathered import Gathered
from distap.ranking.loss import Loss


class CrossBatchMemory:
    """The newest `size` descriptors: queries are ranked against them too, but they get no gradient.

    Every rank remembers the same. An image that comes again replaces its older descriptor.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size is {size}; it must not be below 0")
        self.size = size
        # Of K images, the newest last: `descriptors` (K, C), `labels` (K, L) from the finest level
        # to the coarsest, and `images` (K,), the number of each in its data set, -1 if unknown.
        # Empty before the first batch.
        self._rows: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows.get("images", ()))

    def refuse_unfit(self, loss: Loss, may_ignore: bool = False) -> None:
        """Raise a DistapError if a loss, or a term of it, cannot rank against this memory.

        Args:
            may_ignore: accept a loss that is of the batch alone whatever the gallery.
        """
        takes = loss.takes_memory
        if self.size and not (takes or (may_ignore and takes is None)):
            raise DistapError(
                "loss.takes_no_memory",
                f"memory: {type(loss).__name__}, or a term of it, is a loss of the batch alone and"
                " cannot rank against descriptors of earlier ones: leave the memory out",
            )

    def extend(self, gathered: Gathered) -> Gathered:
        """Return the batch with remembered descriptors of other images appended to its gallery."""
        if not self._rows:
            return gathered
        rows = self._of_other_images(gathered)
        levels = gathered.gallery_levels.shape[1]
        remembered = rows["labels"].shape[1]
        if levels != remembered:
            raise DistapError(
                "data.wrong_labels",
                f"labels have {levels} levels, but those of the memory's descriptors have"
                f" {remembered}",
            )
        return replace(
            gathered,
            gallery=torch.cat([gathered.gallery, rows["descriptors"].to(gathered.gallery)]),
            gallery_levels=torch.cat([gathered.gallery_levels, rows["labels"]]),
        )

    def remember(self, gathered: Gathered) -> None:
        """Add a batch; drop the oldest descriptors."""
        if self.size == 0:
            return
        # The gathered batch is the same on all ranks, so their memories stay equal without a
        # message.
        newest = {
            "descriptors": gathered.descriptors,
            "labels": gathered.levels,
            "images": gathered.samples,
        }
        if self._rows:
            older = self._of_other_images(gathered)
            newest = {name: torch.cat([older[name], rows]) for name, rows in newest.items()}
        # Copies: a slice would keep all of the tensor that it was cut from.
        self._rows = {name: rows[-self.size :].detach().clone() for name, rows in newest.items()}

    def _of_other_images(self, gathered: Gathered) -> dict[str, Tensor]:
        # Without the images of the batch, on its device: an image would be its own easiest
        # positive, and the batch has its newer descriptor. Images without a number (-1) are never
        # the same.
        images = self._rows["images"].to(gathered.samples.device)
        other = ~(torch.isin(images, gathered.samples) & (images >= 0))
        return {name: rows.to(images.device)[other] for name, rows in self._rows.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._rows)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state; take the newest descriptors if `size` is smaller now."""
        self._rows = {name: rows[max(0, len(rows) - self.size) :] for name, rows in state.items()}
