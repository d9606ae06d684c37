"""Backbones of timm."""

import difflib
from dataclasses import dataclass
from typing import Any

import timm
from torch import nn

from distap.errors import DistapError


@dataclass(frozen=True)
class TimmBackbone:
    """A network of timm without its classifier and pooling.

    Args:
        architecture: timm's name of it, such as `resnet50` or `vit_base_patch16_224.dino`.
    """

    architecture: str = "resnet50"

    def build(self, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> nn.Module:
        """Return the network with random weights; it gives maps (n, C, h, w) or (n, h, w, C), or tokens (n, t, C).

        Args:
            drop_rate, drop_path_rate: dropout and stochastic depth.
        Raises:
            DistapError: timm does not know the architecture, or cannot build it like this.
        """
        if not timm.is_model(self.architecture.split(".")[0]):
            close = difflib.get_close_matches(self.architecture, timm.list_models(), n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() lists them"
            raise DistapError(f"model.backbone: timm knows no network named {self.architecture!r}; {hint}")
        options: dict[str, Any] = {"num_classes": 0, "global_pool": ""}
        # Some architectures do not take these options, so a rate of zero is left out.
        options |= {k: v for k, v in (("drop_rate", drop_rate), ("drop_path_rate", drop_path_rate)) if v}
        try:
            network: nn.Module = timm.create_model(self.architecture, **options)
        except Exception as error:  # each architecture raises its own
            raise DistapError(
                f"model.backbone: timm could not build {self.architecture!r} with {options}: {error}"
            ) from error
        return network


def architecture_of(backbone: nn.Module) -> str:
    """Return timm's name of the architecture, or the class name of a backbone from elsewhere."""
    about = getattr(backbone, "pretrained_cfg", None) or {}
    return str(about.get("architecture") or type(backbone).__name__)
