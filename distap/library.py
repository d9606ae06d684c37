"""The Python API: train, load a network, describe images."""

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub import ModelHubMixin
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from distap.config.network import ModelSection
from distap.config.reading import load_recipe, recorded_recipe
from distap.data.images.decoding import EncodedImage, image_file
from distap.data.images.whole_images import Sizing
from distap.data.map_style import source_of
from distap.data.shards.parallel import untracked
from distap.errors import FINISHED, DistapError, checked, tensor_given
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.backbone import architecture_of
from distap.model.network import GivenNetwork
from distap.model.trained import BACKBONE, CONFIG, HEAD, HUB, is_saved, read_saved
from distap.ranking.loss import AnyLoss, build_loss
from distap.retrieval.whitening import WHITENING_FILE, load_whitening, save_whitening
from distap.telemetry.terminal import track
from distap.trainer import trained
from distap.training.build import GIVEN_PARTS, describing_of, network_of, trained_network, with_given
from distap.world import World

CHUNK = 128  # images that are decoded before they are described
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
        """Scale an image to (3, height, width) uint8, for a loader of one's own; see `describe` for images."""
        describer = self.describer
        return describer.sizing(EncodedImage(image_file(image), describer.max_pixels), scaled=describer.scaled)

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
        while chunk := [*map(image_file, islice(left, CHUNK))]:
            parts.append(self.describer.describe(chunk))
        return torch.cat(parts) if parts else torch.empty(0, self.dimensions)

    def write(self, folder: Path) -> None:
        """Write the network for `load` into an existing folder."""
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
                "model": self._model.model_dump(mode="json", exclude={"weights"}),
                "sizing": str(described.sizing),
                "scales": list(described.network.scales),
                "scale_power": described.network.power,
                "antialias": described.antialias,
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
            most, scaled = int(about["max_pixels"]), bool(about["scaled_decoding"])
            antialias = bool(about["antialias"])
        except (ValueError, KeyError, TypeError) as error:
            raise DistapError(f"{model_id}: not a network that distap has saved: {error!r}") from error
        data = {} if sizing.pixels is None else {"image_size": sizing.pixels}
        recipe = recorded_recipe({"model": about["model"], "data": data}, model_id)
        recipe = with_given(recipe, network, model_id, sizing.pixels)
        whole = network_of(recipe, World(device=torch.device(device)), saved)
        describer = ImageDescriber(whole, sizing, scales, power, whitening, most, scaled=scaled, antialias=antialias)
        return cls(describer, recipe.model)


@checked
def train(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    network: nn.Module | None = None,
    loss: AnyLoss | None = None,
    data: Any = None,
) -> Path:
    """Train a recipe, with Python objects in place of names if given, and return the run's folder.

    The run goes on from its newest checkpoint, if there is one. Under torchrun each rank calls this. It joins the
    ranks by itself, and hears SIGTERM and SIGINT as `distap train` does: it then writes a checkpoint and raises
    SystemExit(75). The record of the run has the class of an object; `load` needs a network like it.

    Args:
        recipe: a YAML file, or a dict of a recipe's keys and values.
        overrides: changes to the recipe, with dotted keys (`optimizer.learning_rate`) or nested dicts. A dict with
            a `name` replaces the part that was chosen before.
        network: takes images (n, 3, height, width), float32, with sides of data.image_size pixels, and gives
            descriptors (n, C), which are then scaled to length 1. Pixels are normalised by the `mean` and `std` of
            its `pretrained_cfg`, as timm's networks have them; other networks get them from 0 to 1. BatchNorm is as
            model.batchnorm says, frozen by default. It is trained in place, unless an engine on several ranks shares
            its parameters out. A network of `load` may be given too, to train it on.
        loss: what `Multistage` takes: a name, a Loss or its class, or a function of (descriptors, labels).
        data: images to train on, see `source_of`; or a dict of `train`, `validation` and `gallery`. Batches come from
            the recipe's sampling, and images are augmented as it says.
    Raises:
        DistapError: a key, a value or an object is wrong, or the training failed; the message says what to do.
    """
    if threading.current_thread() is not threading.main_thread():
        raise DistapError("distap.train listens for signals, so call it in the main thread")
    if torch.distributed.is_initialized():
        raise DistapError("distap.train joins the ranks by itself; call it before torch.distributed is initialised")
    objects: dict[str, Any] = {} if loss is None else {"loss": build_loss(loss)}
    if network is not None:
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise DistapError(f"network: {type(network).__name__} has no parameter that requires a gradient")
        whole = network.describer.retrieval_network if isinstance(network, DescriptorNetwork) else network
        objects |= {f"model.{part}": GivenNetwork(whole) for part in GIVEN_PARTS}
        objects["model.projection"] = None
    sets = data if isinstance(data, Mapping) else {} if data is None else {"train": data}
    if unknown := sets.keys() - {"train", "validation", "gallery"}:
        raise DistapError(f"data: it has {', '.join(map(str, unknown))}; expected train, validation and gallery")
    shows = track if os.environ.get("RANK", "0") == "0" else untracked
    objects |= {f"data.{name}": source_of(one, shows) for name, one in sets.items()}
    read = load_recipe(recipe if isinstance(recipe, Mapping) else Path(recipe), {**(overrides or {}), **objects})
    with trained(read) as status:
        pass
    if status != FINISHED:
        raise SystemExit(status)
    return read.run


@checked
def load(
    source: str | Path,
    *,
    best: bool = False,
    sizing: str | None = None,
    scales: Sequence[float] | None = None,
    whitening: str | Path | None = None,
    device: str | torch.device | None = None,
    network: nn.Module | None = None,
) -> DescriptorNetwork:
    """Load a trained network for use.

    Args:
        source: a run, one of its checkpoints, the URL of either, a folder that `save_pretrained` or `distap export`
            wrote, or `hf-hub:NAME`. What follows is for runs and checkpoints; the others say it themselves.
        best: take a run's best checkpoint instead of its newest.
        sizing: `crop N`, `resize M crop N`, `resize HxW crop N`, `side N` or `original`, in pixels; None takes the
            recipe's.
        scales: factors of an image's size at which it is described; None takes the recipe's.
        whitening: a result of `distap whiten`.
        device: None takes a GPU if there is one.
        network: a network built like the one given to `train`; it gets the trained parameters.
    Raises:
        DistapError: there is no such network, it is damaged, or `network` is missing or does not fit.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise DistapError(f"device: {device!r} cannot be used: {shorten(str(error), 200)}") from error
    name = str(source)
    if is_saved(name):
        found: DescriptorNetwork = DescriptorNetwork.from_pretrained(
            name.removeprefix(HUB), device=place, network=network
        )
        return found
    world = World(device=place)
    recipe, whole = trained_network(source, world, best, given=network)
    how = None if sizing is None else Sizing.parse(sizing), tuple(map(float, scales or recipe.evaluation.scales))
    describer = describing_of(recipe, whole, world, *how).describer
    learned = None if whitening is None else load_whitening(Path(whitening))
    return DescriptorNetwork(replace(describer, whitening=learned), recipe.model)
