"""Engines turn the replayed gradients of many ranks into one update of the parameters."""
