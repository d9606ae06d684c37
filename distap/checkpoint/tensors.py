"""Write and read a checkpoint's tensors as safetensors; one of the ranks writes each tensor or shard once.

Neither the files nor their index are pickles, so that reading them runs no code.
"""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distap.checkpoint.manifest import SHARD, DamagedCheckpointError

# We call it without a process group on purpose; the user can do nothing about the warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's part of all tensors into a folder, which may differ between ranks.

    Raises:
        OSError: on all ranks, if any rank cannot write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException, which carries the errors of all ranks
        raise OSError("; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())) from error


def read_tensors(folder: Path, files: Collection[str], prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors of a verified checkpoint whose name starts with `prefix`, to the CPU.

    `files` are the names in the manifest. The header of a shard says where its part of a tensor begins.
    """
    # The reader opens all shards that it finds, so none may lie there that was not verified.
    if foreign := {path.name for path in folder.glob("*.safetensors")}.difference(files):
        raise DamagedCheckpointError(folder, f"{min(foreign)} is not in its manifest")
    try:
        reader = HuggingFaceStorageReader(str(folder))
        room = sum((folder / name).stat().st_size for name in files if SHARD.fullmatch(name))
        tensors = {}
        for name, stored in reader.read_metadata().state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata) or not name.startswith(prefix):
                continue
            size = stored.size.numel() * stored.properties.dtype.itemsize
            if size > room:  # before memory is allocated for it
                raise ValueError(f"{name} is to have {size:,} bytes, more than all files together")
            tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        # Each rank reads what it needs from the same files, so the ranks have nothing to agree on.
        load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        causes = "; ".join(str(cause[0]) for cause in error.failures.values())
        raise DamagedCheckpointError(folder, causes) from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedCheckpointError(folder, str(error)) from error
    return tensors
