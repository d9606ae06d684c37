"""Stage two: the loss of a global batch and the gradient of every descriptor."""
