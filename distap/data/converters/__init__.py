"""Convert published benchmark data sets to shards; docs/guides/data-sets.md lists them."""

from distap.data.converters import faces, landmarks, metric_learning, protocols, revisited

DATASETS = {**metric_learning.SETS, **landmarks.SETS, **revisited.SETS, **protocols.SETS, **faces.SETS}
