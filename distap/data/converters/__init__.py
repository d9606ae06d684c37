"""Convert published benchmark data sets to shards; docs/guides/data-sets.md lists them."""

from distap.data.converters import faces, landmarks, metric_learning, protocols, revisited  # noqa: F401 - add theirs
from distap.data.converters.dataset import DATASETS as DATASETS
from distap.data.converters.dataset import convert as convert
