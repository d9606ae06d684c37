"""Predict memory, traffic and seconds of a recipe's steps on any number of GPUs."""
