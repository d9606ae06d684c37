"""The manifest of a checkpoint: size and SHA-256 of each file, so that no damaged one is loaded.

Neither torch.distributed.checkpoint nor safetensors has checksums: a file with flipped bits loads
without an error. Tensors are safetensors: reading them runs no code. One of the ranks writes each
tensor or shard of one.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from distap.errors import DistapError
from distap.storage.atomic import FileIdentity
from distap.storage.texts import parsed_json
from distap.world import World

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # the tensors that one rank wrote
MANIFEST_FORMAT = 3
# Copies of a rank's tensors that safetensors holds in memory before it writes them.
SERIALIZED_COPIES = 2
# from name and shape of a tensor to a DTensor of that shape, or None
ShardOf = Callable[[str, torch.Size], Tensor | None]


class DamagedCheckpointError(DistapError):
    """Raised when a checkpoint's files differ from those written."""


def damaged(where: object, damage: object) -> DamagedCheckpointError:
    """Return the error of the checkpoint at a path or URL."""
    return DamagedCheckpointError("checkpoint.damaged", f"{where}: damaged checkpoint: {damage}")


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint and the training that they belong to."""

    step: int  # number of steps done
    ranks: int  # that wrote it
    files: dict[str, FileIdentity]
    # Fingerprint of the data, version of the order of batches, and the name of the score.
    about: dict[str, Any] = field(default_factory=dict)
    score: float | None = None  # of this state, if it was evaluated

    def text(self) -> str:
        return _text({"format": MANIFEST_FORMAT, **asdict(self)})


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse and verify a manifest; messages name its checkpoint as `where`.

    Raises:
        DamagedCheckpointError: the manifest differs from the one that was written.
        DistapError: another version of distap wrote the manifest.
    """
    try:
        text = data.decode()
        content = parsed_json(text)
        del content["sha256"]
        if _text(content) != text:  # any other byte is damage, in white space as well
            raise damaged(where, f"{MANIFEST_FILE} is not the file that was written")
        written = content.pop("format")
        if written != MANIFEST_FORMAT:
            raise DistapError(
                "checkpoint.other_version",
                f"{where}: format {written!r} of checkpoints, expected {MANIFEST_FORMAT}: go on"
                " with the version of distap that wrote it, or move this checkpoint elsewhere",
            )
        files = {name: FileIdentity(**identity) for name, identity in content.pop("files").items()}
        # The names become paths, which could lead anywhere.
        foreign = sorted(name for name in files.keys() - {STATE_FILE} if not SHARD.fullmatch(name))
        if foreign or STATE_FILE not in files:
            raise damaged(
                where, f"{MANIFEST_FILE} lists other files than a checkpoint's: {foreign}"
            )
        return Manifest(files=files, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(where, f"{MANIFEST_FILE}: {type(error).__name__}: {error}") from error


def _text(content: dict[str, Any]) -> str:
    # A manifest of any other form counts as damaged. Its own checksum is part of it.
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": checksum}, indent=2, sort_keys=True) + "\n"


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Ignore torch's warning of no process group, which a caller may turn into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class _Writer(HuggingFaceStorageWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part.

        Raises:
            MemoryError: too little memory for safetensors, which would end the process.
        """
        needed = SERIALIZED_COPIES * sum(
            item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            for item in plan.items
            if item.tensor_data is not None
        )
        try:
            np.empty(needed, np.uint8)  # reserved and given back
        except MemoryError as error:
            raise MemoryError(
                f"memory ran out: writing a checkpoint takes {needed / 1e6:,.1f} MB next to the"
                " tensors"
            ) from error
        return super().write_data(plan, planner)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write this rank's part of all tensors into a folder, which may differ between ranks.

    Raises:
        OSError: on all ranks, if any rank cannot write.
    """
    try:
        with _alone_on_purpose():
            save(
                dict(tensors),
                storage_writer=_Writer(str(folder), save_distributed=True),
                process_group=world.group,
                no_dist=world.group is None,
            )
    except CheckpointException as error:  # a BaseException, which carries the errors of all ranks
        causes = (f"{world.called(rank)}: {cause[0]}" for rank, cause in error.failures.items())
        raise OSError("; ".join(causes)) from error


def read_tensors(
    folder: Path, files: Collection[str], prefix: str = "", shard_of: ShardOf | None = None
) -> dict[str, Tensor]:
    """Read the tensors of a verified checkpoint whose name starts with `prefix`, to the CPU.

    The header of a file says where its part of a tensor begins.

    Args:
        files: the names in the manifest.
        shard_of: returns, by the name and shape of a tensor, one that is shared out among the
            ranks, of which this rank's part alone is read; or None, for a whole tensor.
    """
    # The reader opens all shards that it finds, so none may lie there that was not verified.
    foreign = {path.name for path in folder.glob("*.safetensors")}.difference(files)
    if foreign:
        raise damaged(folder, f"{min(foreign)} is not in its manifest")
    try:
        reader = HuggingFaceStorageReader(str(folder))
        room = sum((folder / name).stat().st_size for name in files if SHARD.fullmatch(name))
        tensors = {
            name: _allocate(name, stored, room, shard_of)
            for name, stored in reader.read_metadata().state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and name.startswith(prefix)
        }
        # Each rank reads what it needs from the same files, so the ranks have nothing to agree on.
        with _alone_on_purpose():
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(str(cause) for cause, *_ in error.failures.values())
        raise damaged(folder, causes) from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise damaged(folder, error) from error
    return tensors


def _allocate(
    name: str, stored: TensorStorageMetadata, room: int, shard_of: ShardOf | None
) -> Tensor:
    """Allocate a stored tensor, unless it claims more than the `room` bytes of all files."""
    size = stored.size.numel() * stored.properties.dtype.itemsize
    if size > room:
        raise ValueError(f"{name} is to have {size:,} bytes, more than all files together")
    shared = shard_of(name, stored.size) if shard_of is not None else None
    if shared is not None:
        return torch.empty_like(shared, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)
