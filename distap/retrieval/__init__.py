"""What a trained network retrieves: extraction of descriptors, and the figures of the field."""
