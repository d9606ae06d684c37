"""Retrieval with descriptors: search, evaluation, whitening and the field's figures."""
