"""Settings of reading in a recipe's `data` section; this module imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PixelSettings:
    """Choose where pixels wait between describe and replay."""

    hold: Literal["auto", "memory", "spool"] = "auto"
    """Hold pixels in memory (`memory`) or in a temporary file of this rank that is mapped into memory (`spool`);
    `auto` takes memory if the share fits."""
    memory_bytes: int = 8 * 2**30
    """Hold at most this many bytes of a rank's share of the global batch in memory with `auto`; an image takes 3 x
    data.image_size ** 2."""
    spool_folder: Path | None = None
    """Folder of the spool file; null takes the system's for temporary files. A folder that is itself in memory
    (tmpfs) saves no memory."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; expected 0 or more")

    def in_memory(self, share_bytes: int) -> bool:
        return self.hold == "memory" or (self.hold == "auto" and share_bytes <= self.memory_bytes)
