"""One file per family of losses, and base classes for further ones."""
