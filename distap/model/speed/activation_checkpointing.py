"""Activation checkpointing: activations are computed again in the backward pass instead of being kept."""

from distap.errors import DistapError
from distap.model.network import RetrievalNetwork


def activation_checkpointing(network: RetrievalNetwork) -> None:
    """Switch it on where the backbone has it; replay then takes less memory and a second forward pass.

    Raises:
        DistapError: the backbone has none, or its BatchNorm would update its statistics in both passes.
    """
    backbone = network.backbone
    name = (getattr(backbone, "pretrained_cfg", None) or {}).get("architecture") or type(backbone).__name__
    if network.batchnorm != "frozen":
        raise DistapError(
            "step.activation_checkpointing needs frozen BatchNorm (model.batchnorm: frozen): `batch` would update "
            "its statistics in both forward passes"
        )
    try:
        backbone.set_grad_checkpointing(True)
    except (AttributeError, AssertionError, TypeError, NotImplementedError) as error:
        raise DistapError(
            f"step.activation_checkpointing: timm has none for {name}; set it to false, and replay.size to less, or "
            "take another backbone"
        ) from error
