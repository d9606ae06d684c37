"""distap trains image-retrieval descriptors by optimising Average Precision over huge batches."""

__version__ = "0.1.0"
