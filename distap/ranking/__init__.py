"""Stage two: rank all descriptors of a global batch, and take the gradient of each.

Tensors in, loss and gradients out. Knows no files, no configuration and no network.
"""

from distap.ranking.gathered import Gathered, gather
from distap.ranking.gathering import Gathering
from distap.ranking.losses.blackbox import BlackBoxAP
from distap.ranking.losses.calibration import Calibration, Roadmap
from distap.ranking.losses.metric_learning import MetricLearning
from distap.ranking.losses.modules import ListwiseLoss
from distap.ranking.losses.quantized import FastAP, QuantizedAP, TieAwareAP
from distap.ranking.losses.registry import AP_LOSSES, LOSSES, PRESETS, build_loss, suggestion, with_preset
from distap.ranking.losses.smooth import SmoothAP, SupAP
from distap.ranking.losses.sums import WeightedSum
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.protocol import Loss, Mode, Ranking
from distap.ranking.rank import rank, rank_descriptors

__all__ = [
    "AP_LOSSES",
    "LOSSES",
    "PRESETS",
    "BlackBoxAP",
    "Calibration",
    "CrossBatchMemory",
    "FastAP",
    "Gathered",
    "Gathering",
    "ListwiseLoss",
    "Loss",
    "MetricLearning",
    "Mode",
    "QuantizedAP",
    "Ranking",
    "Roadmap",
    "SmoothAP",
    "SupAP",
    "TieAwareAP",
    "WeightedSum",
    "build_loss",
    "gather",
    "rank",
    "rank_descriptors",
    "suggestion",
    "with_preset",
]
