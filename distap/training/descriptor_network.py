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
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.adapters import from_peft
from distap.model.backbone import architecture_of
from distap.model.network import digests_of
from distap.model.trained import ADAPTERS, BACKBONE, CHANGED, CONFIG, HEAD, read_saved
from distap.registry import build_recorded
from distap.retrieval.whitening import WHITENING_FILE, save_whitening
from distap.training.build import describing_of, network_of, with_given
from distap.world import World, refuse_default_device

DECODED_AT_ONCE = 128  # images that are decoded before they are described
# keys of a recipe's evaluation, and of DescribedBy
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
        """Describe (n, 3, height, width) pixels from 0 to 255 on one device as (n, D) of length
        1."""
        given = tensor_given(pixels, "pixels")
        if given.ndim != 4 or given.shape[1] != 3:
            told = f"pixels are {tuple(given.shape)}; expected (n, 3, height, width)"
            raise DistapError(f"{told}; `describe` takes images of any kind")
        descriptors: Tensor = self.network(given)
        return descriptors

    def transform(self, image: Any) -> Tensor:
        """Scale an image of any kind that `describe` takes to (3, height, width) uint8, for your
        own data loader.
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
                f"images: a {type(images).__name__}; describe takes several, so put one into a list"
            )
        left = iter(images)
        parts = list[Tensor]()
        while chunk := [*islice(left, DECODED_AT_ONCE)]:
            parts.append(self.describer.describe_pixels(map(self.transform, chunk), len(chunk)))
        return torch.cat(parts) if parts else torch.empty(0, self.dimensions)

    def write(self, folder: Path, changes_only: bool = False) -> None:
        """Write the network into an existing folder, from which `distap.load` reads it.

        With `changes_only`, write what training changed of a frozen or adapted network, and the
        name of its base. A DistapError if the base is not known, cannot be built or is not the one
        that was trained.
        """
        described = self.describer
        network = self.describer.retrieval_network
        if changes_only:
            files, about = self._changes()
        else:
            state = dict(network.state_dict())
            backbone = [name for name in state if name.startswith("backbone.")]
            files = {
                BACKBONE: {name.removeprefix("backbone."): state.pop(name) for name in backbone},
                HEAD: state,
            }
            about = {
                "model": self._recipe.model.model_dump(
                    mode="json", exclude={"weights", "freeze", "adapter"}
                )
            }
        for file, tensors in files.items():
            # One copy for each name: safetensors refuses two names that share memory, as tied
            # weights do.
            copies = {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in tensors.items()
            }
            # save_file lets only its owner read it
            (folder / file).write_bytes(save(copies, {"format": "pt"}))
        if described.whitening is not None:
            save_whitening(folder / WHITENING_FILE, described.whitening)
        pretrained = getattr(network.backbone, "pretrained_cfg", None) or {}
        config = {
            "architecture": architecture_of(network.backbone),
            "num_classes": 0,
            "model_args": getattr(network.backbone, "built_with", {}),
            "num_features": network.features,
            "pretrained_cfg": {name: pretrained[name] for name in TIMM_KEYS if name in pretrained},
            "distap": {
                **about,
                "data": {"image_size": self._recipe.data.image_size},
                "evaluation": {key: getattr(described.described_by, key) for key in DESCRIBED},
                "whitened": described.whitening is not None,
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
            if read_again.describer.described_by != described.described_by:
                raise DistapError(
                    "the base has changed since it was trained: export with --format safetensors"
                )

    def _changes(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return the changed tensors by file, and the name and the record of the base."""
        network = self.describer.retrieval_network
        begun = self.describer.retrieval_network.begun
        if begun is None:
            raise DistapError(
                "the network's base is not known: take a run, or a folder of --format adapter"
            )
        settings = {
            "model": begun,
            "data": {"image_size": self._recipe.data.image_size},
            "base": {},
        }
        recipe = recorded_recipe(settings, "the base", trusted=self.trusts)
        weights = build_recorded("weights", begun["weights"], self.trusts)
        base = network_of(with_given(recipe, None, "the base"), World(), weights)
        before = base.state_dict()
        after = network.state_dict()
        merged = {f"{name.partition('.lora_')[0]}.weight" for name in from_peft(network.adapters)}
        changed = {
            name: after[name]
            for name in after.keys() - merged
            if not after[name].cpu().equal(before[name])
        }
        of_base = {name: digest for name, digest in digests_of(base).items() if name not in changed}
        files = {CHANGED: changed} | (
            {ADAPTERS: dict(network.adapters)} if network.adapters else {}
        )
        return files, {"model": begun, "base": {"timm": timm.__version__, "sha256": of_base}}

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
