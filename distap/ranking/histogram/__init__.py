"""Losses that see similarities through soft histograms only: two passes over tiles of pairs, in linear memory."""
