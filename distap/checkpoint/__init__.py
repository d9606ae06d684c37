"""Checkpoints: sharded over the ranks, written while training goes on, and verified before anything
is loaded.
"""
