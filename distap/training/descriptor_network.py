"""A trained network with its image size, scales and whitening, as `distap.load` gives it."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from distap.config.reading import recorded_recipe
from distap.config.sections import ModelSection
from distap.data.images.decoding import EncodedImage, image_file
from distap.data.sizing import Sizing
from distap.errors import DistapError, tensor_given
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.backbone import architecture_of
from distap.model.trained import BACKBONE, CONFIG, HEAD, read_saved
from distap.retrieval.whitening import WHITENING_FILE, load_whitening, save_whitening
from distap.training.build import network_of, with_given
from distap.world import World

DECODED_AT_ONCE = 128  # images that are decoded before they are described
TIMM_KEYS = ("input_size", "interpolation", "crop_pct", "mean", "std", "first_conv", "classifier", "license")


class DescriptorNetwork(
    nn.Module,
    ModelHubMixin,
    library_name="distap",
    pipeline_tag="image-feature-extraction",
    tags=["image-retrieval", "timm"],
):
    """A trained network in evaluation mode, with its image size, scales and whitening.

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
        return self.describer.dimensions

    def forward(self, pixels: Tensor) -> Tensor:
        """Describe (n, 3, height, width) pixels from 0 to 255 on one device as (n, D) of length 1."""
        given = tensor_given(pixels, "pixels")
        if given.ndim != 4 or given.shape[1] != 3:
            told = f"pixels are {tuple(given.shape)}; expected (n, 3, height, width)"
            raise DistapError(f"{told}; `describe` takes images of any kind")
        descriptors: Tensor = self.network(given)
        return descriptors

    def transform(self, image: Any) -> Tensor:
        """Scale an image of any kind that `describe` takes to (3, height, width) uint8, for your own data loader."""
        describer = self.describer
        return describer.sizing(EncodedImage(image_file(image), describer.max_pixels))

    def describe(self, images: Iterable[Any]) -> Tensor:
        """Return (n, D) float32 of length 1 on the CPU; images of one shape are described together.

        Args:
            images: PIL images, paths, the bytes of files, or uint8 pixels: arrays (height, width, 3), tensors
                (3, height, width). A JPEG that PIL has decoded gives a slightly other descriptor than its file, which
                is decoded at reduced scale.
        Raises:
            DamagedImageError: an image cannot be decoded.
            DistapError: it is none of these.
        """
        if isinstance(images, str | Path | bytes | Image.Image) or not isinstance(images, Iterable):
            raise DistapError(f"images: a {type(images).__name__}; describe takes several, so put one into a list")
        left, parts = iter(images), list[Tensor]()
        while chunk := [*map(image_file, islice(left, DECODED_AT_ONCE))]:
            parts.append(self.describer.describe(chunk))
        return torch.cat(parts) if parts else torch.empty(0, self.dimensions)

    def write(self, folder: Path) -> None:
        """Write the network into an existing folder, from which `distap.load` reads it."""
        described, network = self.describer, self.describer.retrieval_network
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
        backbone = {
            name.removeprefix("backbone."): state.pop(name) for name in list(state) if name.startswith("backbone.")
        }
        for file, tensors in ((BACKBONE, backbone), (HEAD, state)):
            (folder / file).write_bytes(save(tensors, {"format": "pt"}))  # save_file lets only its owner read it
        if described.whitening is not None:
            save_whitening(folder / WHITENING_FILE, described.whitening)
        about = getattr(network.backbone, "pretrained_cfg", None) or {}
        config = {
            "architecture": architecture_of(network.backbone),
            "num_classes": 0,
            "model_args": getattr(network.backbone, "built_with", {}),
            "num_features": network.features,
            "pretrained_cfg": {name: about[name] for name in TIMM_KEYS if name in about},
            "distap": {
                "model": self._model.model_dump(mode="json", exclude={"weights", "freeze", "adapter"}),
                "sizing": str(described.sizing),
                "scales": list(described.network.scales),
                "scale_power": described.network.power,
                "antialias": described.antialias,
                "dimensions": described.first,
                "whitened": described.whitening is not None,
            },
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")

    def _save_pretrained(self, save_directory: Path) -> None:
        self.write(save_directory)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        device: str | torch.device = "cpu",
        network: nn.Module | None = None,
        **download: Any,
    ) -> "DescriptorNetwork":
        download.pop("config", None)
        saved = read_saved(model_id, **download)
        about = saved.settings
        try:
            sizing, scales, power = Sizing.parse(about["sizing"]), about["scales"], about["scale_power"]
            whitening = load_whitening(Path(str(saved.folder))) if about["whitened"] else None
            ways = {"antialias": about["antialias"], "first": about["dimensions"]}
        except (ValueError, KeyError, TypeError) as error:
            raise DistapError(f"{model_id}: not a network that distap has saved: {error!r}") from error
        data = {} if sizing.pixels is None else {"image_size": sizing.pixels}
        recipe = recorded_recipe({"model": about["model"], "data": data}, model_id)
        recipe = with_given(recipe, network, model_id, sizing.pixels)
        whole = network_of(recipe, World(device=torch.device(device)), saved)
        describer = ImageDescriber(whole, sizing, scales, power, whitening, **ways)
        return cls(describer, recipe.model)
