"""Losses by soft histograms of similarities, in two passes over tiles of pairs, linear memory."""
