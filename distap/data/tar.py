"""The members of a tar archive, read strictly.

webdataset and tarfile read on after most kinds of damage, and samples are lost without a word. What trains from an
index needs to know of every sample, so the pass here refuses an archive with anything wrong in it.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path

from distap.errors import DistapError

BLOCK = 512  # bytes of a tar block; two of zeros end an archive


def read_members(shard: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Files of a tar with their contents; anything but a whole archive is refused."""
    length = shard.stat().st_size
    with shard.open("rb") as file:
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - closed with the file
            for member in tar:
                end = member.offset_data + member.size
                if end > length:
                    raise DistapError(f"{shard}: {member.name} ends at byte {end}, beyond the file's {length}")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise DistapError(f"{shard}: {member.name} is no plain file")
                file.seek(member.offset_data)
                yield member, file.read(member.size)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise DistapError(f"{shard}: damaged tar: {error}") from error
        # tarfile takes any block that it cannot read as the end; only zeros are one.
        file.seek(tar.offset)
        rest = length - tar.offset
        if rest < 2 * BLOCK or rest % BLOCK or any(any(chunk) for chunk in iter(lambda: file.read(2**20), b"")):
            raise DistapError(
                f"{shard}: damaged tar: no proper end after byte {tar.offset} of {length}; expected zeros alone"
            )
