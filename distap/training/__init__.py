"""Build the parts of a training, save and restore its state, and report its progress."""
