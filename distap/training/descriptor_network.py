"""A trained network with its image size, scales and whitening, as `distap.load` gives it."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import ModelHubMixin
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from distap.config.reading import recorded_recipe
from distap.config.recipe import NetworkRecipe
from distap.data.images.decoding import EncodedImage, image_file
from distap.errors import DistapError, tensor_given
from distap.evaluation.describing import describing_of
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.adapters import from_peft
from distap.model.backbone import architecture_of
from distap.model.network import digests_of
from distap.model.trained import (
    ADAPTERS,
    BACKBONE,
    CHANGED,
    CONFIG,
    HEAD,
    SAVED_FORMAT,
    read_saved,
)
from distap.registry import build_recorded
from distap.retrieval.whitening import WHITENING_FILE, save_whitening
from distap.training.build import network_of, with_given
from distap.world import World, refuse_default_device

# Tensors by file and name, and the record of the model.
FilesAndRecord = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]
DECODED_AT_ONCE = 128  # images that are decoded before they are described
# Keys of a recipe's evaluation, which are fields of DescribedBy as well.
DESCRIBED = ("sizing", "scales", "antialias", "dimensions")
TIMM_KEYS = (
    "input_size",
    "interpolation",
    "crop_pct",
    "mean",
    "std",
    "first_conv",
    "classifier",
    "license",
)


class DescriptorNetwork(
    nn.Module,
    ModelHubMixin,
    library_name="distap",
    pipeline_tag="image-feature-extraction",
    tags=["image-retrieval", "timm"],
):
    """A trained network in evaluation mode, with its image size, scales and whitening.

    `save_pretrained`, `from_pretrained` and `push_to_hub` are those of huggingface_hub. The folder
    that they write is also read by timm: `timm.create_model("local-dir:FOLDER", pretrained=True)`
    gives the backbone.

    Args:
        describer: describes images with the network.
        recipe: from which the network was built.
    """

    # Whether its record may name classes that are not distap's. No parameter: huggingface_hub would
    # take one from config.json, which may be a stranger's.
    trusts = False

    def __init__(self, describer: ImageDescriber, recipe: NetworkRecipe) -> None:
        super().__init__()
        self.describer = describer
        self._recipe = recipe
        self.network = describer.network
        self.eval()

    @property
    def dimensions(self) -> int:
        return self.describer.dimensions

    def forward(self, pixels: Tensor) -> Tensor:
        """Describe (n, 3, height, width) pixels from 0 to 255 as (n, D) of length 1."""
        pixels = tensor_given(pixels, "pixels")
        if pixels.ndim != 4 or pixels.shape[1] != 3:
            raise DistapError(
                "image.wrong_shape",
                f"pixels are {tuple(pixels.shape)}; expected (n, 3, height, width); `describe`"
                " takes images of any kind",
            )
        descriptors: Tensor = self.network(pixels)
        return descriptors

    def transform(self, image: Any) -> Tensor:
        """Scale an image to (3, height, width) uint8, for your own data loader.

        It may be of any kind that `describe` takes.
        """
        return self.describer.sizing(EncodedImage(image_file(image)))

    def describe(self, images: Iterable[Any]) -> Tensor:
        """Return (n, D) float32 of length 1 on the CPU; images of one shape are described together.

        Args:
            images: PIL images, paths, the bytes of files, or uint8 pixels: arrays (height, width,
                3), tensors (3, height, width). A JPEG that PIL has decoded gives a slightly other
                descriptor than its file, which is decoded at reduced scale.
        Raises:
            DamagedImageError: an image cannot be decoded.
            DistapError: it is none of these.
        """
        refuse_default_device()
        if isinstance(images, str | Path | bytes | Image.Image) or not isinstance(images, Iterable):
            raise DistapError(
                "image.not_a_list",
                f"images: a {type(images).__name__}; describe takes several, so put one into a"
                " list",
            )
        remaining = iter(images)
        rows = [torch.empty(0, self.dimensions)]
        while chunk := [*islice(remaining, DECODED_AT_ONCE)]:
            rows.append(self.describer.describe_pixels(map(self.transform, chunk), len(chunk)))
        return torch.cat(rows)

    def write(self, folder: Path, changes_only: bool = False) -> None:
        """Write the network into an existing folder, from which `distap.load` reads it.

        With `changes_only`, write what training changed of a frozen or adapted network, and the
        name of its base.

        Raises:
            DistapError: the base is not known, cannot be built, or is not the one that was trained.
        """
        describer = self.describer
        network = describer.retrieval_network
        files, record = self._changes() if changes_only else self._all_tensors()
        for file, tensors in files.items():
            # One copy for each name: safetensors refuses two names that share memory, as tied
            # weights do.
            copies = {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in tensors.items()
            }
            # Not by save_file, which lets only the owner read the file.
            (folder / file).write_bytes(save(copies, {"format": "pt"}))
        if describer.whitening is not None:
            save_whitening(folder / WHITENING_FILE, describer.whitening)
        pretrained = getattr(network.backbone, "pretrained_cfg", None) or {}
        config = {
            "architecture": architecture_of(network.backbone),
            "num_classes": 0,
            "model_args": getattr(network.backbone, "built_with", {}),
            "num_features": network.features,
            "pretrained_cfg": {name: pretrained[name] for name in TIMM_KEYS if name in pretrained},
            "distap": {
                "format": SAVED_FORMAT,
                **record,
                "data": {"image_size": self._recipe.data.image_size},
                "evaluation": {key: getattr(describer.described_by, key) for key in DESCRIBED},
                "whitened": describer.whitening is not None,
            },
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
        if changes_only:
            if network.adapters:
                network.backbone.peft_config["default"].save_pretrained(folder)
            # Matrices that adapters were merged into are not among the changes. So only reading the
            # folder back shows whether the base, as it can be fetched today, and the adapters still
            # give them.
            read_again = self.from_pretrained(folder, trust=self.trusts)
            if read_again.describer.described_by != describer.described_by:
                raise DistapError(
                    "network.changed_base",
                    "the base has changed since it was trained: export with --format safetensors",
                )

    def _all_tensors(self) -> FilesAndRecord:
        """Return all tensors by file, and the record of the model."""
        state = dict(self.describer.retrieval_network.state_dict())
        backbone = [name for name in state if name.startswith("backbone.")]
        files = {
            BACKBONE: {name.removeprefix("backbone."): state.pop(name) for name in backbone},
            HEAD: state,
        }
        model = self._recipe.model
        return files, {
            "model": model.model_dump(mode="json", exclude={"weights", "freeze", "adapter"})
        }

    def _changes(self) -> FilesAndRecord:
        """Return the changed tensors by file, and the name and the record of the base."""
        network = self.describer.retrieval_network
        begun = network.begun
        if begun is None:
            raise DistapError(
                "network.unknown_base",
                "the network's base is not known: take a run, or a folder of --format adapter",
            )
        settings = {
            "model": begun,
            "data": {"image_size": self._recipe.data.image_size},
            "base": {},
        }
        recipe = recorded_recipe(settings, "the base", trusted=self.trusts)
        weights = build_recorded("weights", begun["weights"], self.trusts)
        base = network_of(with_given(recipe, None, "the base"), World(), weights)
        digests = digests_of(base)
        if begun["adapter"] is not None:
            build_recorded("adapter", begun["adapter"], self.trusts).round_base(base)
        before = base.state_dict()
        after = network.state_dict()
        merged = {f"{name.partition('.lora_')[0]}.weight" for name in from_peft(network.adapters)}
        changed = {
            name: after[name]
            for name in after.keys() - merged
            if not after[name].cpu().equal(before[name])
        }
        digests = {name: digest for name, digest in digests.items() if name not in changed}
        files = {CHANGED: changed}
        if network.adapters:
            files[ADAPTERS] = dict(network.adapters)
        return files, {"model": begun, "base": {"timm": timm.__version__, "sha256": digests}}

    def _save_pretrained(self, save_directory: Path) -> None:
        self.write(save_directory)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        device: str | torch.device = "cpu",
        network: nn.Module | None = None,
        trust: bool = False,
        **download: Any,
    ) -> "DescriptorNetwork":
        download.pop("config", None)
        saved = read_saved(model_id, trust, **download)
        recipe = recorded_recipe(saved.settings, model_id, trusted=trust)
        world = World(device=torch.device(device))
        recipe = with_given(recipe, network, model_id)
        whitening = saved.folder if saved.settings["whitened"] else None
        describing = describing_of(
            recipe, network_of(recipe, world, saved), world, whitening=whitening
        )
        loaded = cls(describing.describer, recipe)
        loaded.trusts = trust
        return loaded
