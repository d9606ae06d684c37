"""The manifest of a checkpoint: size and SHA-256 of each file, so that damage is found before anything is loaded.

torch.distributed.checkpoint has no checksums: a file with flipped bits loads without an error.
"""

import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from distap.errors import DistapError
from distap.storage.atomic import write_whole
from distap.storage.hashing import FileIdentity, file_identity

MANIFEST_FILE, STATE_FILE, METADATA_FILE = "manifest.json", "state.json", ".metadata"
SHARE = re.compile(r"__\d+_\d+\.distcp")  # a rank's file of torch.distributed.checkpoint
FORMAT = 2
_GO_ON = "go on with the version of distap that wrote it, or move this checkpoint elsewhere"
T = TypeVar("T", str, Path)


class DamagedCheckpointError(DistapError):
    """The files of a checkpoint are not those that were written; takes its place and the damage, or one text."""

    def __init__(self, *parts: object) -> None:
        super().__init__(": damaged checkpoint: ".join(map(str, parts)))


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint and the training that they belong to."""

    step: int  # number of steps done
    ranks: int  # that wrote it
    files: dict[str, FileIdentity]
    about: dict[str, Any] = field(default_factory=dict)  # hashes of configuration and data
    score: float | None = None  # validation mAP of this state, if it was evaluated

    def text(self) -> str:
        return _text(asdict(self), FORMAT)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / MANIFEST_FILE, manifest.text())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and verify its own checksum.

    Raises:
        DamagedCheckpointError: it is missing or not the one that was written.
        DistapError: another version of distap wrote it, or reading it is forbidden, so that it may be a good one.
    """
    if (folder / "state.pt").exists():
        raise DistapError(f"{folder}: an earlier version of distap wrote this checkpoint: {_GO_ON}")
    try:
        return parse_manifest((folder / MANIFEST_FILE).read_bytes(), folder)
    except PermissionError as error:
        raise DistapError(f"{folder}: {error}; allow reading it, or move this checkpoint elsewhere") from error
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE}: {type(error).__name__}: {error}") from error


def parse_manifest(data: bytes, where: Path | str) -> Manifest:
    """Parse and verify a manifest; `where` names its checkpoint in messages."""
    try:
        text = data.decode()
        content = json.loads(text)
        del content["sha256"]
        written = content.pop("format")
        if _text(content, written) != text:  # any other byte is damage, in white space as well
            raise DamagedCheckpointError(where, f"{MANIFEST_FILE} is not the file that was written")
        if written != FORMAT:
            raise DistapError(f"{where}: format {written!r} of checkpoints, expected {FORMAT}: {_GO_ON}")
        files = {name: FileIdentity(**identity) for name, identity in content.pop("files").items()}
        foreign = sorted(name for name in files.keys() - {STATE_FILE, METADATA_FILE} if not SHARE.fullmatch(name))
        if foreign or not files.keys() >= {STATE_FILE, METADATA_FILE}:
            raise DamagedCheckpointError(where, f"{MANIFEST_FILE} lists other files than a checkpoint's: {foreign}")
        return Manifest(files=files, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(where, f"{MANIFEST_FILE}: {type(error).__name__}: {error}") from error


def damaged_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the damage of each file that is not the one in the manifest."""
    for name in names:
        expected = manifest.files[name]
        try:
            status = (folder / name).lstat()
            # Read nothing of another size, nor anything but a plain file, which may have no end.
            is_same = stat.S_ISREG(status.st_mode) and status.st_size == expected.bytes
            is_same = is_same and file_identity(folder / name) == expected
        except OSError as error:
            yield name, f"{name} cannot be read: {error}"
            continue
        if not is_same:
            yield name, f"{name} is not the file that was written (size or SHA-256 differ)"


def best_of(checkpoints: Iterable[T], read: Callable[[T], Manifest]) -> tuple[float, T] | tuple[None, None]:
    """Return the highest validation mAP of a checkpoint, and the newest such one; damaged ones do not count."""
    scores = []
    for checkpoint in checkpoints:
        with suppress(DamagedCheckpointError):
            score = read(checkpoint).score
            if score is not None:
                scores.append((score, checkpoint))
    return max(scores) if scores else (None, None)


def _text(content: dict[str, Any], written: Any) -> str:
    """Format a manifest, its own checksum included, in the one way that counts as undamaged."""
    body = json.dumps({"format": written, **content}, sort_keys=True)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"format": written, **content, "sha256": checksum}, indent=2, sort_keys=True) + "\n"
