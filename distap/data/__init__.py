"""Images in WebDataset shards: packing, the index, the plan of batches, reading by offset."""
