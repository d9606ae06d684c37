"""Converters of the papers' data sets to shards; README.md beside this file is their guide."""
