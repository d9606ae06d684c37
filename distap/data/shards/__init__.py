"""WebDataset shards: write, index, check and describe them."""
