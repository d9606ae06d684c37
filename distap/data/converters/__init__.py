"""Converters of the papers' data sets to shards; see docs/guides/data-sets.md."""
