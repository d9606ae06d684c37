"""Which network it was: a hash that stands for it beside the descriptors it made."""

import hashlib
import json

import torch
from torch import nn

from distap.model.network import RetrievalNetwork


def fingerprint(network: RetrievalNetwork) -> str:
    """SHA-256, in hexadecimal, of all that decides a network's descriptors.

    That is the architecture's name, the pooling with its settings, and the name, dtype, shape and bytes of every
    parameter and buffer, the mean and deviation of its pixels among them. Neither the device nor how the tensors lie
    in memory counts.
    """
    pooling = network.pooling
    about = {
        "architecture": _architecture(network.backbone),
        "pooling": type(pooling).__name__,
        "settings": {name: value for name, value in vars(pooling).items() if _is_setting(name, value)},
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    tensors = {**network.state_dict(), **dict(network.named_buffers())}
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _architecture(backbone: nn.Module) -> str:
    about = getattr(backbone, "pretrained_cfg", None) or {}
    return str(about.get("architecture") or type(backbone).__name__)


def _is_setting(name: str, value: object) -> bool:
    return name != "training" and not name.startswith("_") and isinstance(value, bool | int | float | str)
