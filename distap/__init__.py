"""distap trains image-retrieval descriptors by optimising Average Precision over huge batches.

The names below are the library. Each is imported when it is first used, so `import distap` needs no torch.
"""

import importlib
from functools import cache
from pathlib import Path
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

    __version__: str

RELEASE = "0.1.0"

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


@cache
def _version() -> str:
    """Return the release with the commit of the checkout that runs, or of what was installed: 0.1.0+g1a2b3c4."""
    import subprocess  # these take longer than all else here
    from importlib import metadata

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    try:  # site-packages may lie within a checkout of something else, which does not track them
        if commit := git("ls-files", "__init__.py") and git("describe", "--always", "--dirty=.dirty", "--exclude=*"):
            return f"{RELEASE}+g{commit}"
        return metadata.version("distap")
    except (OSError, subprocess.SubprocessError, metadata.PackageNotFoundError):
        return RELEASE


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'distap' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_MODULES]
