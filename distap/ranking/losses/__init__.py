"""The listwise losses, one file each, and the registry that names them."""
