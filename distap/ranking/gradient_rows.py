"""Gradients that are made when they are asked for."""

import torch
from jaxtyping import Float
from torch import Tensor

from distap.ranking.gathered import Gathered
from distap.ranking.histogram.passes import Passes
from distap.ranking.precision import full_precision


class GradientRows:
    """The gradient of this rank's descriptors, for its slots; called with rows, it gives theirs.

    The first row of a part of the batch that is asked for makes the whole part. Each pair is looked at once, for both
    of its images where both are this rank's, and what is known of it is let go then.

    Args:
        passes: all pairs counted; the second pass is this object's.
        slopes: as `passes.slopes_by_code` gives them.
        gathered: the batch.
    """

    def __init__(self, passes: Passes, slopes: Float[Tensor, "codes N"], gathered: Gathered) -> None:
        world, taking_part = gathered.world, gathered.taking_part
        self._passes, self._slopes = passes, slopes
        positions = passes.positions
        # A row more, which stays zero, for those that take no part.
        self._gradient = gathered.gallery.new_zeros(len(positions) + 1, gathered.gallery.shape[1])
        self._place = torch.full((len(world.slots(len(taking_part))),), -1, device=positions.device)
        # Of each image of the batch, which of its rank's rows it is.
        row = taking_part.nonzero().flatten() // world.size
        self._place[row[positions]] = torch.arange(len(positions), device=positions.device)
        self._part = torch.full(self._place.shape, -1)
        parts = [torch.full((len(own),), number) for number, own in enumerate(passes.own)]
        self._part[row[positions].cpu()] = torch.cat(parts)
        self._made = {-1}

    @torch.no_grad()
    def __call__(self, rows: slice | Tensor) -> Float[Tensor, "n C"]:
        """Gradient of some rows, zero for one that takes no part.

        Args:
            rows: of this rank's slots.
        """
        for part in self._part[rows if isinstance(rows, slice) else rows.cpu()].unique().tolist():
            if part not in self._made:
                with full_precision(self._gradient.device):
                    self._passes.add_gradient(self._passes.own[part], self._slopes, self._gradient[:-1])
                self._made.add(part)
        return self._gradient[self._place[rows]]
