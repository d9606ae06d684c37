"""Decode, transform and batch images."""
