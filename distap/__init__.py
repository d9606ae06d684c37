"""distap trains image-retrieval descriptors by optimising Average Precision over huge batches.

The names below are the library. Each is imported when it is first used, so `import distap` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distap.evaluation.given_descriptors import evaluate as evaluate
    from distap.library import load as load
    from distap.library import train as train
    from distap.multistage import Multistage as Multistage
    from distap.ranking.listwise import ListwiseLoss as ListwiseLoss
    from distap.ranking.loss import Loss as Loss
    from distap.ranking.losses.base import DescriptorLoss as DescriptorLoss
    from distap.ranking.losses.base import SimilarityLoss as SimilarityLoss
    from distap.ranking.losses.function import loss as loss
    from distap.ranking.rank import rank as rank
    from distap.retrieval.indexing import search_index as search_index
    from distap.stages.micro_batches import MicroBatchSizes as MicroBatchSizes
    from distap.world import World as World

__version__ = "0.1.0"

_MODULES = {
    "DescriptorLoss": "distap.ranking.losses.base",
    "ListwiseLoss": "distap.ranking.listwise",
    "Loss": "distap.ranking.loss",
    "Multistage": "distap.multistage",
    "MicroBatchSizes": "distap.stages.micro_batches",
    "SimilarityLoss": "distap.ranking.losses.base",
    "World": "distap.world",
    "evaluate": "distap.evaluation.given_descriptors",
    "load": "distap.library",
    "loss": "distap.ranking.losses.function",
    "rank": "distap.ranking.rank",
    "search_index": "distap.retrieval.indexing",
    "train": "distap.library",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'distap' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_MODULES]
