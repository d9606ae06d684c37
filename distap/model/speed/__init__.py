"""Faster forward and backward passes: folded BatchNorm, torch.compile, activation checkpointing."""
