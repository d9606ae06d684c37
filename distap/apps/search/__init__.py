"""Search an index by images or keys: the ground of `distap search` and `distap serve`."""
