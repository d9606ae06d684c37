"""Describe whole data sets, into memory or into a folder."""
