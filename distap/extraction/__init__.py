"""Descriptors of whole data sets: into memory for evaluation, into a folder for everything else."""

from distap.extraction.describer import (
    BATCH_PIXELS,
    ImageDescriber,
    TooLittleMemoryError,
    describer_from,
    describer_of,
    refuse_foreign_whitening,
)
from distap.extraction.in_memory import Extracted, extract_descriptors
from distap.extraction.parts import NOT_FINITE, BrokenOffError
from distap.extraction.to_folder import DType, Written, extract_to_folder, left_out_of

__all__ = [
    "BATCH_PIXELS",
    "NOT_FINITE",
    "BrokenOffError",
    "DType",
    "Extracted",
    "ImageDescriber",
    "TooLittleMemoryError",
    "Written",
    "describer_from",
    "describer_of",
    "extract_descriptors",
    "extract_to_folder",
    "left_out_of",
    "refuse_foreign_whitening",
]
