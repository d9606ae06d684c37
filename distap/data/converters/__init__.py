"""Convert published benchmark data sets to shards; docs/guides/data-sets.md lists them."""
