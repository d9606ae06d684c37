"""Settings of reading that a recipe's `data` section holds; this module imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PixelSettings:
    """Choose where pixels wait between describe and replay.

    Args:
        hold: `memory`; `spool`, a temporary file of this rank that is mapped into memory; `auto` takes memory if the
            share fits, otherwise the spool.
        memory_bytes: `auto` keeps at most this many bytes of a rank's share of the global batch in memory; an image
            takes 3 x data.image_size ** 2.
        spool_folder: folder of the spool file; null takes the system's for temporary files. A folder that is itself
            in memory (tmpfs) saves none.
    """

    hold: Literal["auto", "memory", "spool"] = "auto"
    memory_bytes: int = 8 * 2**30
    spool_folder: Path | None = None

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; expected 0 or more")

    def in_memory(self, share_bytes: int) -> bool:
        return self.hold == "memory" or (self.hold == "auto" and share_bytes <= self.memory_bytes)


@dataclass(frozen=True)
class CacheSettings:
    """Keep shards on each host's own disk.

    Args:
        folder: where they are kept.
        max_bytes: disk space that all data sets may take together.
    """

    folder: Path
    max_bytes: int

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes: {self.max_bytes}: expected a number of bytes above 0")
