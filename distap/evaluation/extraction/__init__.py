"""Descriptors of whole data sets: into memory for evaluation, into a folder for everything else."""

from distap.evaluation.extraction.describer import (
    BATCH_PIXELS,
    ImageDescriber,
    TooLittleMemoryError,
    describer_from,
    describer_of,
    refuse_foreign_whitening,
)
from distap.evaluation.extraction.in_memory import Extracted, extract_descriptors
from distap.evaluation.extraction.parts import NOT_FINITE, BrokenOffError
from distap.evaluation.extraction.to_folder import DType, Written, extract_to_folder, left_out_of

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
