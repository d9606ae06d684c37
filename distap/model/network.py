"""The retrieval network."""

import difflib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import timm
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.model.pooling import POOLING
from distap.model.weights import load_weights

BatchNormMode = Literal["frozen", "batch"]


class RetrievalNetwork(nn.Module):
    """Images to descriptors of length 1.

    BatchNorm is frozen by default: it stays in evaluation mode, its scale and shift still learn. Multistage
    backpropagation needs that an image's descriptor does not depend on the images beside it. With `batch`, it
    normalises by the micro-batch, and forwards without a graph leave its running statistics alone, so that a
    step, which describes every image twice, updates them once.

    Whatever the autocast around it, pooling, head and normalisation are computed in float32: ranking compares
    descriptors that differ by little.

    Attributes:
        compiled: runs the backbone while training, where it is set (see `compile_backbone`).
        memory_format: of the pixels that the backbone is given.

    Args:
        backbone: gives feature maps (n, C, h, w), (n, h, w, C) or tokens (n, tokens, C).
        pooling: turns (n, C, h, w) into (n, C).
        projection: dimensions of a linear layer before normalisation; None for no layer.
        batchnorm: `frozen` or `batch`.
        mean, std: of the pixels the backbone was trained with, in units of 255.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: Any,
        pooling: nn.Module,
        projection: int | None = None,
        batchnorm: BatchNormMode = "frozen",
        mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
        std: tuple[float, float, float] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        # In some backbones (mobilenetv3) a head widens the features after the last stage.
        self.features = int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)
        self.dimensions = projection or self.features
        self.batchnorm = batchnorm
        self.compiled: Callable[[nn.Module, Tensor], Tensor] | None = None
        self.memory_format = torch.channels_last
        self.backbone = backbone
        self.pooling = pooling
        self.head = nn.Identity() if projection is None else nn.Linear(self.features, projection)
        self._skipped_tokens = int(getattr(backbone, "num_prefix_tokens", 0))
        self._normalisers = [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> "RetrievalNetwork":
        """Set training mode, in which frozen BatchNorm stays as it is in evaluation."""
        super().train(mode)
        if self.batchnorm == "frozen":
            for normaliser in self._normalisers:
                normaliser.eval()
        return self

    def running_statistics(self) -> list[Tensor]:
        """Statistics of BatchNorm that training moves: none where it is frozen."""
        moving = self._normalisers if self.batchnorm == "batch" else []
        return [s for m in moving for s in (m.running_mean, m.running_var) if s is not None]

    def forward(
        self, images: UInt8[Tensor, "n 3 height width"] | Float[Tensor, "n 3 height width"]
    ) -> Float[Tensor, "n C"]:
        """Descriptors of length 1, float32 or wider, of images whose values are 0 to 255."""
        pixels = (images.to(self.mean.dtype, memory_format=self.memory_format) - self.mean) / self.std
        with self._statistics_kept():
            features = self._features(pixels)
        with in_full_precision(features.device):
            return normalize(self.head(self.pooling(self._as_map(features).to(self.mean.dtype))))

    def _features(self, pixels: Float[Tensor, "n 3 height width"]) -> Tensor:
        if self.compiled is not None and self.training:
            return self.compiled(self.backbone, pixels)
        features: Tensor = self.backbone(pixels)
        return features

    def _as_map(self, features: Tensor) -> Float[Tensor, "n C h w"]:
        if features.ndim == 3:
            return features[:, self._skipped_tokens :].transpose(1, 2).unsqueeze(-1)
        if features.ndim == 4 and features.shape[1] != self.features:
            return features.permute(0, 3, 1, 2)
        return features

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Without a graph, normalise by the micro-batch but leave the running statistics alone."""
        touched = [] if torch.is_grad_enabled() else [m for m in self._normalisers if m.training]
        for normaliser in touched:
            normaliser.track_running_stats = False
        try:
            yield
        finally:
            for normaliser in touched:
                normaliser.track_running_stats = True


def build_network(
    backbone: str,
    weights: dict[str, Any],
    pooling: dict[str, Any],
    projection: int | None = None,
    batchnorm: BatchNormMode = "frozen",
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
) -> RetrievalNetwork:
    """A retrieval network over any timm backbone.

    Args:
        backbone: timm's name of it.
        weights: where its weights come from: `name` is `timm`, `random`, `file` (with `path`) or `package` (with
            `package`).
        pooling: `name` of the pooling and its settings.
        projection: dimensions of a linear layer after pooling, or None.
        batchnorm: `frozen` or `batch`.
        drop_rate, drop_path_rate: dropout and stochastic depth, as timm understands them.
    Raises:
        DistapError: the backbone is unknown or cannot be built without its classifier, or the weights do not fit.
    """
    if not timm.is_model(backbone.split(".")[0]):
        close = difflib.get_close_matches(backbone, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "; timm.list_models() lists them"
        raise DistapError(f"model.backbone: timm knows no network named {backbone!r}{hint}")
    # A rate of zero is not passed on, since not every backbone of timm takes it.
    rates = {"drop_rate": drop_rate, "drop_path_rate": drop_path_rate}
    options: dict[str, Any] = {
        "num_classes": 0,
        "global_pool": "",
        **{name: rate for name, rate in rates.items() if rate},
    }
    try:
        network = timm.create_model(backbone, weights["name"] == "timm", **options)
    except Exception as error:  # the hub's client has exceptions of its own
        raise DistapError(
            f"model.backbone: timm could not build {backbone!r} with {options}: {error}{_offline_hint(weights)}"
        ) from error
    load_weights(network, backbone, weights)
    settings = {key: value for key, value in pooling.items() if key != "name"}
    data: dict[str, Any] = network.pretrained_cfg  # type: ignore[assignment]
    return RetrievalNetwork(
        network,
        POOLING[pooling["name"]](**settings),
        projection,
        batchnorm,
        mean=data.get("mean", (0.5, 0.5, 0.5)),
        std=data.get("std", (0.5, 0.5, 0.5)),
    ).to(memory_format=torch.channels_last)


def _offline_hint(weights: dict[str, Any]) -> str:
    if weights["name"] != "timm":
        return ""
    return " (its pretrained weights come from a hub; model.weights can also name a file or a package)"


def in_full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Within an autocast region, one in which there is none; elsewhere nothing, which torch.export can write down."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
