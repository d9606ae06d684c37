"""Collectives of gloo that refuse what NCCL refuses, on tensors of the twin device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from twin_device import Twin, values

DTYPES = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
CHECKED = ("all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor", "scatter", "send", "recv")
# They would need uneven sizes, or pickle what they send, which also takes the CPU's memory.
REFUSED = ("gather", "all_gather", "all_to_all", "gather_object", "all_gather_object", "broadcast_object_list")


class RefusedError(Exception):
    """NCCL would not do this, or not with these tensors."""


@contextmanager
def nccl_rules() -> Iterator[None]:
    """Use the rules for as long as the context lasts."""
    checked = {name: _checked(name, getattr(dist, name)) for name in CHECKED}
    refused = {name: _refused(name) for name in REFUSED}
    with patch.multiple(dist, **checked, **refused):
        yield


def _checked(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    all_gather_object = dist.all_gather_object

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        for tensor in tensors:
            if not isinstance(tensor, Twin):
                raise RefusedError(f"{name} of a tensor on the CPU, of {tuple(tensor.shape)}")
            if not tensor.is_contiguous():
                raise RefusedError(f"{name} of a tensor that is not contiguous, of {tuple(tensor.shape)}")
            if tensor.dtype not in DTYPES:
                raise RefusedError(f"{name} of {tensor.dtype}")
        if name not in ("send", "recv"):
            own = [list(one.shape) for one in tensors] if name != "scatter" else [list(tensors[0].shape)]
            sizes: list[Any] = [None] * dist.get_world_size()
            all_gather_object(sizes, own)
            if any(one != own for one in sizes):
                raise RefusedError(f"{name} of {sizes}")
        return collective(*tree_map_only(Twin, values, args), **tree_map_only(Twin, values, kwargs))

    return call


def _refused(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise RefusedError(f"{name}: NCCL has none, or not for these sizes")

    return call
