"""Foundations of the three stages: micro-batches, replicas of networks, and the replay drift."""
