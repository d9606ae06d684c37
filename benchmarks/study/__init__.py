"""Train a grid of recipes under equal conditions, and compare what they reach."""
