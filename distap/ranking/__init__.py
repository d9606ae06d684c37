"""Stage two: rank all descriptors of a global batch, and take the gradient of each.

Tensors in, loss and gradients out. Knows no files, no configuration and no network.
"""

from distap.ranking.blackbox import BlackBoxAP
from distap.ranking.calibration import Calibration, Roadmap
from distap.ranking.gathered import Gathered, gather
from distap.ranking.gathering import Gathering
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.metric_learning import MetricLearning
from distap.ranking.modules import ListwiseLoss
from distap.ranking.protocol import Loss, Mode, Ranking
from distap.ranking.quantized import FastAP, QuantizedAP, TieAwareAP
from distap.ranking.registry import AP_LOSSES, LOSSES, PRESETS, build_loss, suggestion, with_preset
from distap.ranking.smooth import SmoothAP, SupAP
from distap.ranking.stage_two import rank, rank_descriptors
from distap.ranking.sums import WeightedSum

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
