"""One file a family of losses, and the bases to write one from."""
