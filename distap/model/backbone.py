"""Backbones of timm."""

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from distap.errors import DistapError
from distap.model.hollow import tried
from distap.registry import SOURCES

# Arguments by which vision transformers take images of any size: position embeddings are resampled
# and borders padded to whole patches.
ANY_SIZE: dict[str, Any] = {"dynamic_img_size": True, "dynamic_img_pad": True}
# Arguments of timm.create_model that distap sets.
OURS = (
    "num_classes",
    "global_pool",
    "pretrained",
    "features_only",
    # Weights come from model.weights alone, whose readers run no code of a file.
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
)
# The words of a TypeError before the names of arguments that a network does not take.
UNKNOWN = "unexpected keyword argument"


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
        """Return a timm network with random weights.

        It outputs maps (n, C, h, w) or (n, h, w, C), or tokens (n, t, C). Its attribute
        `built_with` holds the arguments with which timm builds one of the same tensors.

        Args:
            arguments: of timm.create_model, such as `drop_path_rate`.
            image_size: width and height of the images, pixels, for a network that is built for one
                size.
            pools: keep the network's own pooling, which its `forward_head` then applies to its
                output.
        """
        name, source, saved_arguments = self._resolved()
        ours = arguments.keys() & OURS
        if ours:
            raise DistapError(
                "network.reserved_argument",
                f"model.arguments.{min(ours)}: distap sets it; leave it out",
            )
        chosen = {key: value for key, value in saved_arguments.items() if key not in OURS}
        chosen.update(arguments)
        network = self._created(
            name, source, ANY_SIZE | chosen, optional=ANY_SIZE.keys() - chosen.keys(), pools=pools
        )

        own_size = network.pretrained_cfg.get("input_size", (0,))[-1]
        if image_size in (None, own_size) or "img_size" in arguments or not _has_one_size(network):
            return network
        if _takes(network, image_size, pools):
            return network
        resized = self._created(
            name, source, chosen | {"img_size": image_size}, optional={"img_size"}, pools=pools
        )
        if not _takes(resized, image_size, pools):
            return network
        resized.pretrained_cfg["input_size"] = (3, image_size, image_size)
        return resized

    def _resolved(self) -> tuple[str, Any, dict[str, Any]]:
        """Return timm's name of the architecture, and what its source says.

        A source, a hub or a folder, gives timm's configuration of the network and arguments to
        build it.
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
                    config, architecture, arguments = read(name.removeprefix(prefix))
                    return architecture, config, dict(arguments or {})
                except Exception as error:  # the hub's client raises its own
                    raise DistapError(
                        "network.unreadable", f"model.backbone: {name}: cannot be read: {error}"
                    ) from error
        if not timm.is_model(name.split(".")[0]):
            close = difflib.get_close_matches(name, timm.list_models(), n=3)
            hint = (
                f"did you mean {' or '.join(close)}?" if close else "timm.list_models() lists them"
            )
            raise DistapError(
                "network.unknown", f"model.backbone: timm knows no network named {name!r}; {hint}"
            )
        return name, None, {}

    def _created(
        self,
        name: str,
        source: Any,
        arguments: dict[str, Any],
        optional: Collection[str],
        pools: bool,
    ) -> Any:
        """Create the network; omit the optional arguments if it rejects one of them."""
        import timm

        head = {"num_classes": 0} if pools else {"num_classes": 0, "global_pool": ""}
        try:
            network = timm.create_model(
                name,
                pretrained_cfg=source,
                pretrained_cfg_overlay=self.pixels,
                **head,
                **arguments,
            )
        except Exception as error:  # each architecture raises its own
            if isinstance(error, AssertionError) and not pools:
                # timm insists on a head that pools: it is built, but not run.
                network = self._created(name, source, arguments, optional, pools=True)
                network.head_hidden_size = None
                return network

            unknown = set(re.findall(r"'(\w+)'", str(error).partition(UNKNOWN)[2]))
            if unknown & set(optional):
                required = {key: arguments[key] for key in arguments if key not in optional}
                return self._created(name, source, required, optional=(), pools=pools)
            if unknown:
                key = min(f"arguments.{key}" if key in arguments else key for key in unknown)
                raise DistapError(
                    "network.unknown_argument",
                    f"model.{key}: {name} does not take it; leave it out",
                ) from error
            raise DistapError(
                "network.not_built",
                f"model.backbone: timm could not build {name!r} with {arguments | head}: {error}",
            ) from error

        # The size of the images gives that of the position embeddings.
        size = getattr(getattr(network, "patch_embed", None), "img_size", None)
        vars(network)["built_with"] = arguments | ({"img_size": size} if size else {})
        if pools:
            vars(network)["forward"] = network.forward_features
        return network


def _has_one_size(network: Any) -> bool:
    """Return whether timm says that a network takes images of one size only."""
    patches = getattr(network, "patch_embed", None)
    fixed_size = network.pretrained_cfg.get("fixed_input_size")
    return bool(getattr(patches, "strict_img_size", fixed_size))


def _takes(backbone: Any, size: int, pools: bool) -> bool:
    backbone = tried(backbone)
    device = next(backbone.parameters()).device
    try:
        with torch.no_grad():
            features = backbone.eval()(torch.zeros(1, 3, size, size, device=device))
            if pools:
                backbone.forward_head(features, pre_logits=True)
    except Exception:  # each architecture raises its own
        return False
    finally:
        backbone.train()
    return True


def timm_config(backbone: nn.Module) -> dict[str, Any]:
    """Return timm's configuration of a network; {} for another backbone."""
    return getattr(backbone, "pretrained_cfg", None) or {}


def architecture_of(backbone: nn.Module) -> str:
    """Return timm's name of the architecture, or the class name of another backbone."""
    return str(timm_config(backbone).get("architecture") or type(backbone).__name__)


def pixels_of(backbone: nn.Module) -> dict[str, Any]:
    """Return the mean and std of pixels with which a timm network was trained."""
    config = timm_config(backbone)
    return {name: tuple(config[name]) for name in ("mean", "std") if name in config}


def built_again(backbone: Any) -> dict[str, Any]:
    """Return keys of a recipe's section `model` that rebuild a timm network without its source."""
    return {
        "backbone": {
            "name": "timm",
            "architecture": architecture_of(backbone),
            "pixels": pixels_of(backbone),
        },
        "arguments": backbone.built_with,
    }


def gives_signed(backbone: nn.Module) -> bool:
    """Return whether about half of the features are negative, as layer normalisation makes them."""
    return any(isinstance(module, nn.LayerNorm) for module in backbone.modules())


def is_plain(backbone: Any) -> bool:
    """Return whether a network is a plain CNN, whose own pooling is the mean of its maps.

    The maps are hardly ever negative. Other networks pool by a token, by attention, or with layers
    behind the mean.
    """
    from timm.layers import SelectAdaptivePool2d

    pool = getattr(backbone, "global_pool", None)
    if not isinstance(pool, nn.Module):
        pool = getattr(getattr(backbone, "head", None), "global_pool", None)
    is_last = getattr(backbone, "head_hidden_size", None) == getattr(backbone, "num_features", None)
    return isinstance(pool, SelectAdaptivePool2d) and is_last and not gives_signed(backbone)


def has_class_token(backbone: nn.Module) -> bool:
    """Return whether the first token is a class token."""
    return bool(
        getattr(backbone, "has_class_token", getattr(backbone, "cls_token", None) is not None)
    )
