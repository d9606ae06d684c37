"""Losses that depend on similarities through soft histograms: two passes over tiles of pairs,
linear memory.
"""
