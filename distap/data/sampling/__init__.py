"""Ways to choose the images of a global batch."""
