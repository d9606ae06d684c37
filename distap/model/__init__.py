"""The network that turns an image into a descriptor, and ways to make it faster."""
