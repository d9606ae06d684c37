"""The names of the library, from which `__init__.py` learns where each is defined."""

from distap.apps.compare import compare as compare
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

RELEASE: str
__version__: str
