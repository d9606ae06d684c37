"""Section of a recipe about the network."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_validator,
)

from distap.config.validation import Section
from distap.registry import REGISTRY, Chosen, name_of


class ModelSection(Section):
    """The network: backbone, weights, pooling and projection."""

    backbone: Annotated[Any, Chosen("backbone", otherwise="timm")] = "resnet50"
    """Network without pooling and classifier; a name alone is an architecture of timm."""
    weights: Annotated[Any, Chosen("weights")] = "timm"
    """Pretrained weights; a backbone from elsewhere starts with random ones by default."""
    pooling: Annotated[Any, Chosen("pooling", otherwise="gem")] = "auto"
    """Pooling of the features of an image into one vector: native is the one that the backbone was pretrained with,
    and auto is native, or gem for a plain CNN."""
    freeze: Literal["backbone"] | dict[Literal["blocks"], int] | list[str] | None = None
    """Do not train `backbone`; or {blocks: N}, the first N blocks and the stem (-N: all but the last N); or the
    parameters that a list of patterns names, such as [pooling.power, backbone.stem.*]."""
    adapter: Annotated[Any, Chosen("adapter", otherwise="lora")] | None = None
    """Matrices of low rank that are added to those of the backbone's layers, and learn in their place."""
    arguments: dict[str, Any] = Field({})
    """Further arguments of timm.create_model, such as {img_size: 448} or {drop_path_rate: 0.1}."""
    layer_norm: bool = False
    """Apply layer normalisation to the pooled vector, as in ROADMAP's code."""
    projection: PositiveInt | None = None
    """Number of dimensions of a linear layer after pooling; null for no layer."""
    whitening: NonNegativeInt = 0
    """Start the projection with the PCA whitening of this many training images; 0 starts it at random."""
    batchnorm: Literal["frozen", "batch"] = "frozen"
    """Normalise BatchNorm layers by the stored statistics (frozen) or by the micro-batch's (batch)."""

    @model_validator(mode="before")
    @classmethod
    def _of_timm(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping):
            return settings
        backbone = settings.get("backbone", "resnet50")
        if isinstance(backbone, str):
            is_of_others = ":" in backbone and not backbone.startswith(("hf-hub:", "local-dir:"))
            is_architecture = not is_of_others and backbone not in REGISTRY["backbone"]
            backbone = {"architecture" if is_architecture else "name": backbone}
        is_of_timm = not isinstance(backbone, Mapping) or backbone.get("name", "timm") == "timm"
        if settings.get("arguments") and not is_of_timm:
            raise ValueError("model.arguments are for networks of timm; write other keys beside the backbone's name")
        return {"weights": "timm" if is_of_timm else "random", **settings, "backbone": backbone}

    @field_serializer("backbone", mode="wrap")
    def _architecture_alone(self, backbone: Any, handler: SerializerFunctionWrapHandler) -> Any:
        settings = handler(backbone)
        alone = settings.get("name", "timm") == "timm" and not settings.get("pixels")
        return settings["architecture"] if alone else settings

    @property
    def architecture(self) -> str:
        """timm's name of the backbone, or "package.module:Class" of another backbone."""
        return str(getattr(self.backbone, "architecture", name_of("backbone", self.backbone)))
