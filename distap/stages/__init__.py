"""Foundations of the three stages: micro-batches and their sizes, replicas of networks, the replay
drift.
"""
