"""Write and read a checkpoint's tensors with torch.distributed.checkpoint, each tensor once, by one of the ranks.

Its metadata file is a pickle, which could run any code. Here it may name only the few classes that metadata consist
of, and only files of the manifest are opened.
"""

import pickle
import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout

from distap.checkpoint.manifest import METADATA_FILE, DamagedCheckpointError
from distap.storage.pickles import ForbiddenGlobalError, RestrictedUnpickler

# We call it without a process group on purpose; the user can do nothing about the warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def _enum_member(kind: Any, name: str) -> Enum:
    """Stand for the getattr that Python 3.11.0 to 3.11.3 write for a member of an enum."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"an attribute of {kind!r} is no part of a checkpoint's metadata")
    return kind[name]


_CLASSES: tuple[Any, ...] = (
    *(ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata),
    *(_MEM_FORMAT_ENCODING, _StorageInfo, _get_layout, torch.Size),
)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _enum_member,
    **{(kind.__module__, kind.__name__): kind for kind in _CLASSES},
    **{("torch", str(kind)[6:]): kind for kind in vars(torch).values() if type(kind) is torch.dtype},
    # The path at which the checkpoint was written, which is not used.
    **{(m, name): PurePath for m in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "WindowsPath")},
}


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write the ranks' tensors into a folder, those of one name once; an OSError of one rank is raised on all."""
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException, which carries the errors of all ranks
        raise OSError("; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())) from error


def read_tensors(folder: Path, files: Collection[str], prefix: str = "") -> dict[str, Tensor]:
    """Read those tensors of a verified checkpoint whose name starts with `prefix`, to the CPU.

    No other file is opened than `files`, the names in its manifest, and nothing but tensors is read.
    """
    metadata = _read_metadata(folder, files)
    room = sum((folder / name).stat().st_size for name in files)
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        if name.startswith(prefix):
            size = stored.size.numel() * stored.properties.dtype.itemsize
            if size > room:  # before memory is allocated for it
                problem = f"{name} is to have {size:,} bytes, more than all files together"
                raise DamagedCheckpointError(folder, f"{METADATA_FILE}: {problem}")
            tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    # Each rank reads what it needs from the same files, so the ranks have nothing to agree on.
    try:
        load(tensors, storage_reader=_Reader(folder, metadata), no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(str(cause[0]) for cause in error.failures.values())
        raise DamagedCheckpointError(folder, causes) from error
    return tensors


class _Reader(FileSystemReader):
    """Takes metadata that have been read safely, since torch's way would run code."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            metadata = RestrictedUnpickler(file, _ALLOWED).load()
    except Exception as error:  # a damaged pickle can fail in any way
        foreign = " is no part of a checkpoint's metadata" if isinstance(error, ForbiddenGlobalError) else ""
        raise DamagedCheckpointError(folder, f"{METADATA_FILE}: {error}{foreign}") from error
    if not isinstance(metadata, Metadata) or not all(
        isinstance(stored, TensorStorageMetadata) for stored in metadata.state_dict_metadata.values()
    ):
        raise DamagedCheckpointError(folder, f"{METADATA_FILE}: something else than tensors is in it")
    if any(place.relative_path not in files for place in metadata.storage_data.values()):
        raise DamagedCheckpointError(folder, f"{METADATA_FILE} names a foreign file")
    return metadata
