"""Errors of images that cannot be used, and their reasons."""

from typing import Literal, get_args

Reason = Literal["decode_error", "truncated", "crc_mismatch", "missing_field", "too_large"]
REASONS: tuple[Reason, ...] = get_args(Reason)
MAX_PIXELS = 100_000_000  # of an image, as it is stored and as it is scaled


class DamagedImageError(Exception):
    """Raised if an image cannot be used, for one of REASONS."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class NoReaderError(DamagedImageError):
    """Raised for an image format without a reader; the message names the package to install."""
