"""Losses over soft histograms of similarities, in two passes over tiles of pairs."""
