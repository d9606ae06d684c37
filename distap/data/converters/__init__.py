"""Converters of the papers' data sets to shards; docs/guides/data-sets.md is their guide."""
