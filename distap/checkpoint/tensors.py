"""A checkpoint's tensors through torch.distributed.checkpoint, each written once, by one of the ranks.

Its metadata is a pickle, and a pickle runs what code it likes. Here it may name the few classes that metadata
consist of and nothing else, and only files of the manifest are opened.
"""

import pickle
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distap.checkpoint.manifest import METADATA_FILE, DamagedCheckpointError
from distap.storage.pickles import ForbiddenGlobalError, RestrictedUnpickler

DCP = "torch.distributed.checkpoint"
METADATA_CLASSES = {
    f"{DCP}.metadata": (
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    f"{DCP}.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),  # looks a layout up by name
    "torch": (
        "Size",
        *(str(kind).removeprefix("torch.") for kind in vars(torch).values() if type(kind) is torch.dtype),
    ),
}

# A world of one is what we mean; the warning is not the user's.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write the ranks' tensors into a folder; what several ranks hold alike is written by one of them.

    Args:
        folder: there already, the same for all ranks.
        tensors: by name; the ranks have the same names.
        group: of the ranks; None for one process alone.
    Raises:
        OSError: on all ranks, where one of them cannot write.
    """
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # is no Exception, and carries those of all ranks
        raise OSError("; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())) from error


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Names of the files that a rank wrote."""
    return sorted(path.name for path in folder.glob(f"__{rank}_*.distcp"))


def read_tensors(
    folder: Path, files: Iterable[str], prefix: str = "", into: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Tensors of a checkpoint whose files have been verified.

    Args:
        folder: of the checkpoint.
        files: names in its manifest; no other file is opened.
        prefix: only tensors whose name starts with it.
        into: tensors to fill, by name, such as the shards of a rank; the others are made on the CPU.
    Raises:
        DamagedCheckpointError: the metadata hold something else than tensors of this checkpoint.
    """
    reader = _ClosedReader(folder, frozenset(files))
    given = into or {}
    room = sum((folder / name).stat().st_size for name in reader.files)
    tensors = {}
    for name, stored in reader.stored_tensors().items():
        if name.startswith(prefix):
            size = stored.size.numel() * stored.properties.dtype.itemsize
            if size > room:
                raise DamagedCheckpointError(
                    folder, f"{METADATA_FILE}: {name} is to have {size:,} bytes, but has fewer"
                )
            tensors[name] = given[name] if name in given else torch.empty(stored.size, dtype=stored.properties.dtype)
    # Every rank reads what it needs: the files are the same for all, so there is nothing to agree on.
    try:
        load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(str(cause[0]) for cause in error.failures.values())
        raise DamagedCheckpointError(folder, causes) from error
    return tensors


class _ClosedReader(FileSystemReader):
    """Reads metadata without running code, and opens files of the manifest only."""

    def __init__(self, folder: Path, files: frozenset[str]) -> None:
        super().__init__(folder)
        self._folder, self.files = folder, files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, if it is what a checkpoint of ours may have."""
        try:
            with (self._folder / METADATA_FILE).open("rb") as file:
                metadata = RestrictedUnpickler(file, _allowed()).load()
        except ForbiddenGlobalError as error:
            raise DamagedCheckpointError(
                self._folder, f"{METADATA_FILE}: {error} is no part of a checkpoint's metadata"
            ) from error
        except Exception as error:  # a pickle fails with whatever its bytes lead to
            raise DamagedCheckpointError(self._folder, f"{METADATA_FILE}: {error}") from error
        if not isinstance(metadata, Metadata) or not all(
            isinstance(stored, TensorStorageMetadata) for stored in metadata.state_dict_metadata.values()
        ):
            raise DamagedCheckpointError(self._folder, f"{METADATA_FILE}: something else than tensors is in it")
        for place in metadata.storage_data.values():
            if place.relative_path not in self.files:
                raise DamagedCheckpointError(self._folder, f"{METADATA_FILE} names a foreign file")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def stored_tensors(self) -> dict[str, TensorStorageMetadata]:
        """Size and kind of each tensor, by name."""
        return dict(self.read_metadata().state_dict_metadata)  # type: ignore[arg-type]  # checked there


@cache
def _allowed() -> dict[tuple[str, str], Any]:
    """The classes that a checkpoint's metadata consist of."""
    allowed: dict[tuple[str, str], Any] = {
        (module, name): getattr(import_module(module), name)
        for module, names in METADATA_CLASSES.items()
        for name in names
    }
    for module in ("pathlib", "pathlib._local"):  # where the checkpoint was written: of no use here
        allowed |= {(module, name): PurePath for name in ("Path", "PosixPath", "WindowsPath")}
    # Python 3.11.0 to 3.11.3 write the member of an enum as a call of getattr.
    return allowed | {("builtins", "getattr"): _enum_member}


def _enum_member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"an attribute of {kind!r} is no part of a checkpoint's metadata")
    return kind[name]
