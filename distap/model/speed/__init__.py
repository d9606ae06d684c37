"""Faster forward passes: compiled backbones, and folded BatchNorm for stage one."""
