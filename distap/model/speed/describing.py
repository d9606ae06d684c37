"""Stage one by itself: no graph is needed, so it may be computed in cheaper ways than replay."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distap.model.network import RetrievalNetwork
from distap.model.speed.compiling import compile_backbone
from distap.model.speed.folding import FoldedNetwork


class Describer:
    """Describes the images of stage one; its difference to replay is the replay drift.

    Args:
        network: the one that is trained; no engine has wrapped it yet where BatchNorm is folded.
        dtype: what convolutions and matrix products are computed in; None computes in the parameters' own.
        fold_batchnorm: fold frozen BatchNorm into the convolutions before it.
    Raises:
        DistapError: the network's BatchNorm cannot be folded.
    """

    def __init__(
        self, network: RetrievalNetwork, dtype: torch.dtype | None = None, fold_batchnorm: bool = False
    ) -> None:
        self._dtype = dtype if dtype != torch.float32 else None
        self._folded = FoldedNetwork(network, self._dtype) if fold_batchnorm else None
        self._network = network if self._folded is None else self._folded.network

    def refresh(self) -> None:
        """Take over the network's present weights: once a step, where its parameters are whole."""
        if self._folded is not None:
            self._folded.refresh()

    def compile(self, sizes: Sequence[int]) -> None:
        """Run the backbone compiled, see `compile_backbone`; where BatchNorm is not folded, that is the network's."""
        compile_backbone(self._network, sizes)

    def __call__(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of a micro-batch, float32 or wider, without a graph."""
        # A fresh region each time: casts of weights that it remembers are stale after the next update.
        with torch.no_grad(), torch.autocast(images.device.type, self._dtype, enabled=self._dtype is not None):
            descriptors: Tensor = self._network(images)
        return descriptors
