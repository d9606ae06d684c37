"""The manifest of a checkpoint: what its files are, so that damage is found before anything is loaded.

torch.distributed.checkpoint has no checksums: a file with flipped bits loads without a word.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distap.errors import DistapError
from distap.storage.atomic import write_whole

MANIFEST_FILE, STATE_FILE, METADATA_FILE = "manifest.json", "state.json", ".metadata"
SHARE = re.compile(r"__\d+_\d+\.distcp")  # what torch.distributed.checkpoint calls a rank's file
FORMAT = 2


class DamagedCheckpointError(DistapError):
    """A checkpoint that is not what was written."""

    def __init__(self, where: Path | str, detail: str) -> None:
        super().__init__(f"{where}: damaged checkpoint: {detail}")


@dataclass(frozen=True)
class FileIdentity:
    """What a file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of, and of which training it is."""

    step: int  # steps behind the state
    ranks: int  # that wrote it
    files: dict[str, FileIdentity]
    about: dict[str, Any] = field(default_factory=dict)  # hashes of configuration and data
    score: float | None = None  # validation mAP of this state, where it was evaluated

    def text(self) -> str:
        """As it is written."""
        return _text(asdict(self), FORMAT)


def file_identity(path: Path) -> FileIdentity:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return FileIdentity(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write folder/manifest.json, through to the disk."""
    write_whole(folder / MANIFEST_FILE, manifest.text())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, after its own checksum has been verified.

    Raises:
        DamagedCheckpointError: there is none, or it is not the one that was written.
        DistapError: another version of distap wrote it.
    """
    if (folder / "state.pt").exists():
        raise DistapError(f"{folder}: an earlier version of distap wrote this checkpoint; this one cannot read it")
    try:
        text = (folder / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE}: {type(error).__name__}: {error}") from error
    return parsed_manifest(text, folder)


def parsed_manifest(data: bytes, where: Path | str) -> Manifest:
    """The manifest that was written as `data`; `where` its checkpoint is, for messages. Raises what reading does."""
    try:
        text = data.decode()
        content = json.loads(text)
        del content["sha256"]
        written = content.pop("format")
        if _text(content, written) != text:  # any other byte is damage, in white space as well
            raise DamagedCheckpointError(where, f"{MANIFEST_FILE} is not the file that was written")
        if written != FORMAT:
            raise DistapError(f"{where}: format {written!r} of checkpoints, expected {FORMAT}: another distap's")
        files = {name: FileIdentity(**identity) for name, identity in content.pop("files").items()}
        foreign = sorted(name for name in files.keys() - {STATE_FILE, METADATA_FILE} if not SHARE.fullmatch(name))
        if foreign or not files.keys() >= {STATE_FILE, METADATA_FILE}:
            raise DamagedCheckpointError(where, f"{MANIFEST_FILE} lists other files than a checkpoint's: {foreign}")
        return Manifest(files=files, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(where, f"{MANIFEST_FILE}: {type(error).__name__}: {error}") from error


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare some of the checkpoint's files with the manifest, byte for byte.

    Raises:
        DamagedCheckpointError: one is missing, unreadable or another.
    """
    for name in names:
        expected = manifest.files[name]
        try:
            status = (folder / name).lstat()
            # What is no file, or of another size, is not worth reading, and may have no end.
            is_same = stat.S_ISREG(status.st_mode) and status.st_size == expected.bytes
            is_same = is_same and file_identity(folder / name) == expected
        except OSError as error:
            raise DamagedCheckpointError(folder, f"{name} cannot be read: {error}") from error
        if not is_same:
            raise DamagedCheckpointError(folder, f"{name} is not the file that was written (size or SHA-256 differ)")


def _text(content: dict[str, Any], written: Any) -> str:
    """The one way in which a manifest is written, its own checksum included."""
    body = json.dumps({"format": written, **content}, sort_keys=True)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"format": written, **content, "sha256": checksum}, indent=2, sort_keys=True) + "\n"
