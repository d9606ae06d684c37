"""Stage two: rank all descriptors of a global batch, and take the gradient of each.

Tensors in, loss and gradients out. Knows no files, no configuration and no network.
"""

from collections.abc import Callable

from distap.ranking.gathered import Gathered, gather
from distap.ranking.quantized import QuantizedAP
from distap.ranking.rank import Loss, Ranking, rank_descriptors

LOSSES: dict[str, Callable[..., Loss]] = {"ap_q": QuantizedAP}

__all__ = ["LOSSES", "Gathered", "Loss", "QuantizedAP", "Ranking", "gather", "rank_descriptors"]
