"""Reading shards from a store: distap next to WebDataset and MosaicML's streaming."""
