"""Read images for training: by offset, or as a stream of shards."""
