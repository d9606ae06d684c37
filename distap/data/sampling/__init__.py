"""Ways to choose the images of a global batch, one a file."""
