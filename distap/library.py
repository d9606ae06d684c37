"""What a script needs beside training: load a network, describe images of any kind, evaluate descriptors."""

import io
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelHubMixin
from numpy.typing import ArrayLike
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn

from distap.config.reading import recorded_recipe
from distap.config.sections import ModelSection
from distap.data.images.decoding import EncodedImage
from distap.data.images.formats import readable_formats
from distap.data.images.whole_images import Sizing
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.backbone import architecture_of
from distap.model.trained import BACKBONE, CONFIG, HEAD, HUB, is_saved, read_saved
from distap.retrieval.metrics import evaluate_labelled_set, evaluate_queries
from distap.retrieval.ranks import require_finite
from distap.retrieval.whitening import WHITENING_FILE, load_whitening, save_whitening
from distap.training.build import network_of, trained_network
from distap.world import World

CHUNK = 128  # images that are decoded before they are described
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
TIMM_KEYS = ("input_size", "interpolation", "crop_pct", "mean", "std", "first_conv", "classifier", "license")


class DescriptorNetwork(
    nn.Module,
    ModelHubMixin,
    library_name="distap",
    pipeline_tag="image-feature-extraction",
    tags=["image-retrieval", "timm"],
):
    """A trained network in evaluation mode, with how it takes images, its scales and its whitening.

    `save_pretrained`, `from_pretrained` and `push_to_hub` are those of huggingface_hub. The folder that they write is
    also read by timm: `timm.create_model("local-dir:FOLDER", pretrained=True)` gives the backbone.

    Args:
        describer: describes images with the network.
        model: the recipe's section from which the network was built.
    """

    def __init__(self, describer: ImageDescriber, model: ModelSection) -> None:
        super().__init__()
        self.describer, self._model = describer, model
        self.network = describer.network
        self.eval()

    @property
    def dimensions(self) -> int:
        """D of the descriptors."""
        return self.describer.dimensions

    def forward(self, pixels: Tensor) -> Tensor:
        """Descriptors (n, D) of length 1 of (n, 3, height, width) pixels from 0 to 255, all on one device."""
        descriptors: Tensor = self.network(pixels)
        return descriptors

    def transform(self, image: Any) -> Tensor:
        """Bring an image to size, (3, height, width) uint8, for a loader of one's own; images as in `describe`."""
        describer = self.describer
        return describer.sizing(EncodedImage(_encoded(image), describer.max_pixels), scaled=describer.scaled)

    def describe(self, images: Iterable[Any]) -> Tensor:
        """Descriptors (n, D) float32 of length 1, on the CPU; images of one shape are described together.

        Args:
            images: PIL images, paths, the bytes of files, or uint8 pixels: arrays (height, width, 3), tensors
                (3, height, width). A JPEG that PIL has decoded gives a slightly other descriptor than its file, which
                is decoded at reduced scale.
        Raises:
            DamagedImageError: an image cannot be decoded.
            DistapError: it is none of these.
        """
        if isinstance(images, str | Path | bytes | Image.Image):
            raise DistapError("describe takes several images; put a single one into a list")
        left, parts = iter(images), list[Tensor]()
        while chunk := [*map(_encoded, islice(left, CHUNK))]:
            parts.append(self.describer.describe(chunk))
        return torch.cat(parts) if parts else torch.empty(0, self.dimensions)

    def write(self, folder: Path) -> None:
        """Write what `load` reads into a folder that is there."""
        described, network = self.describer, self.describer.retrieval_network
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
        backbone = {
            name.removeprefix("backbone."): state.pop(name) for name in list(state) if name.startswith("backbone.")
        }
        save_file(backbone, folder / BACKBONE, {"format": "pt"})
        save_file(state, folder / HEAD, {"format": "pt"})
        if described.whitening is not None:
            save_whitening(folder / WHITENING_FILE, described.whitening)
        about = getattr(network.backbone, "pretrained_cfg", None) or {}
        config = {
            "architecture": architecture_of(network.backbone),
            "num_classes": 0,
            "num_features": network.features,
            "pretrained_cfg": {name: about[name] for name in TIMM_KEYS if name in about},
            "distap": {
                "model": self._model.model_dump(mode="json", exclude={"weights"}),
                "sizing": str(described.sizing),
                "scales": list(described.network.scales),
                "scale_power": described.network.power,
                "max_pixels": described.max_pixels,
                "scaled_decoding": described.scaled,
                "whitened": described.whitening is not None,
            },
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")

    def _save_pretrained(self, save_directory: Path) -> None:
        self.write(save_directory)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, device: str | torch.device = "cpu", **download: Any
    ) -> "DescriptorNetwork":
        download.pop("config", None)
        saved = read_saved(model_id, **download)
        about, recipe = saved.settings, recorded_recipe({"model": saved.settings["model"]}, model_id)
        try:
            sizing, scales, power = Sizing.parse(about["sizing"]), about["scales"], about["scale_power"]
            whitening = load_whitening(Path(str(saved.folder))) if about["whitened"] else None
            most, scaled = int(about["max_pixels"]), bool(about["scaled_decoding"])
        except (ValueError, KeyError, TypeError) as error:
            raise DistapError(f"{model_id}: not a network that distap has saved: {error!r}") from error
        network = network_of(recipe, World(device=torch.device(device)), saved)
        return cls(ImageDescriber(network, sizing, scales, power, whitening, most, scaled=scaled), recipe.model)


def load(
    source: str | Path,
    *,
    best: bool = False,
    sizing: str | None = None,
    scales: Iterable[float] = (1.0,),
    whitening: str | Path | None = None,
    device: str | torch.device | None = None,
) -> DescriptorNetwork:
    """Load a trained network for use.

    Args:
        source: a run, one of its checkpoints, the URL of either, a folder that `save_pretrained` or `distap export`
            wrote, or `hf-hub:NAME`. What follows is for runs and checkpoints; the others say it themselves.
        best: take a run's best checkpoint instead of its newest.
        sizing: `crop N`, `side N` or `original`, N pixels; None crops to the recipe's image size.
        scales: factors of an image's size at which it is described.
        whitening: a result of `distap whiten`.
        device: None takes a GPU if there is one.
    Raises:
        DistapError: there is no such network, or it is damaged.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = str(source)
    if is_saved(name):
        found: DescriptorNetwork = DescriptorNetwork.from_pretrained(name.removeprefix(HUB), device=place)
        return found
    recipe, network = trained_network(source, World(device=place), best)
    data = recipe.data
    describer = ImageDescriber(
        network,
        Sizing.parse(sizing) if sizing else Sizing("crop", data.image_size),
        tuple(map(float, scales)),
        whitening=None if whitening is None else load_whitening(Path(whitening)),
        max_pixels=data.max_pixels,
        scaled=data.scaled_decoding,
        batch_pixels=recipe.evaluation.batch_size * data.image_size**2,
    )
    return DescriptorNetwork(describer, recipe.model)


def evaluate(
    descriptors: ArrayLike | Tensor, labels: ArrayLike | Tensor, queries: ArrayLike | Tensor | None = None
) -> dict[str, float]:
    """Exact retrieval figures from 0 to 1: mAP, mAP@R, R@1, R@5, R@10, mP@1, mP@5 and mP@10.

    Args:
        descriptors: (N, C) of length 1.
        labels: (N,) numbers or texts.
        queries: (N,) bool, which images are queries against all that are not; None ranks, for each image, all others.
    Raises:
        DistapError: shapes differ, a descriptor is not finite, or no query has an image of its class.
    """
    rows = torch.as_tensor(descriptors)
    names = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if rows.ndim != 2 or names.shape != (len(rows),):
        raise DistapError(f"descriptors are {tuple(rows.shape)} and labels {names.shape}; expected (N, C) and (N,)")
    require_finite(rows)
    classes = torch.from_numpy(np.unique(names, return_inverse=True)[1].reshape(-1)).to(rows.device)
    if queries is None:
        return evaluate_labelled_set(rows, classes).summary()
    asks = queries.cpu().numpy() if isinstance(queries, Tensor) else np.asarray(queries)
    if asks.shape != names.shape or asks.dtype != bool or asks.all() or not asks.any():
        raise DistapError(
            f"queries are {asks.shape} {asks.dtype}; expected ({len(rows)},) bool, some of them true, some false"
        )
    mask = torch.from_numpy(asks).to(rows.device)
    return evaluate_queries(rows[mask], rows[~mask], classes[mask], classes[~mask])


def _encoded(image: Any) -> bytes:
    """The bytes of an image file; pixels become a PNG, which loses nothing."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise DistapError(f"{image}: cannot be read: {error.strerror or error}") from error
    if isinstance(image, Tensor):
        image = image.cpu().permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise DistapError(f"an image of {image.shape} {image.dtype}; expected three colours of uint8")
        image = Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, Image.Image):
        raise DistapError(
            f"{type(image).__name__} is no image; expected a PIL image, a path, bytes, an array or a tensor"
        )
    file, has_pixels = getattr(image, "fp", None), not getattr(image, "tile", None)
    if file is not None and not has_pixels and image.format in readable_formats():
        place = file.tell()
        file.seek(0)
        data: bytes = file.read()
        file.seek(place)
        return data
    upright, buffer = ImageOps.exif_transpose(image), io.BytesIO()
    (upright if upright.mode in PNG_MODES else upright.convert("RGB")).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()
