"""Read a trained network from a run, checkpoint, saved folder or hub; start a training from one."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar

import timm
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from distap.checkpoint.finding import opened_checkpoint
from distap.errors import DistapError, logger
from distap.model.adapters import from_peft, merge
from distap.model.backbone import architecture_of
from distap.model.network import RetrievalNetwork, UnitLinear, digests_of, settings_of
from distap.model.pooling import AutoPooling
from distap.registry import GIVEN, build_recorded
from distap.storage.locations import from_folder
from distap.storage.texts import read_json

# Files of a saved folder: of all tensors of a network, or of those that training changed.
CONFIG = "config.json"
SAVED_FORMAT = 1  # of its section `distap` and the files that it describes
BACKBONE = "model.safetensors"
HEAD = "head.safetensors"
ADAPTERS = "adapter_model.safetensors"
CHANGED = "changed.safetensors"
HUB = "hf-hub:"
# Prefixes of the network's tensors in a checkpoint.
OF_NETWORK = "network."
OF_AVERAGE = "ema."


@dataclass(frozen=True)
class TrainedNetwork:
    """The tensors of a trained network, and the record saved with them."""

    whole: ClassVar[bool] = True  # see `build_network`
    where: str  # for messages
    # A recipe, or the `distap` section of config.json; either has a section `model`.
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: str | None = None  # that relative paths of the recipe were relative to
    begun: dict[str, Any] | None = None  # section `model` of the recipe, which names the base
    trusted: bool = False  # whether its record may name classes that are not distap's

    def load(self, network: RetrievalNetwork) -> None:
        """Load the network, merging its adapters.

        Raises:
            DistapError: the recipe's network is another one; the message lists the keys that it
                needs. Or the tensors do not fit.
        """
        differing = self._differing(network)
        if differing:
            raise DistapError(
                "weights.other_recipe",
                f"{self.where}: this network is not the recipe's; to begin from it, the recipe"
                " needs\n"
                + "".join(f"  model.{key}: {json.dumps(differing[key])}\n" for key in differing)
                + "For its backbone alone, `distap export --format safetensors` it and set"
                f" model.weights to {{name: file, path: FOLDER/{BACKBONE}}}",
            )
        base = self.settings.get("base")
        if base is not None:
            self._load_base(network, base)
        names_of_base = {} if base is None else base["sha256"]
        if self.settings["model"].get("adapter") is None:
            self._load_tensors(network, names_of_base)
            network.adapters = {}
        else:
            adapter = self._part("adapter")
            adapter.adapt(network, self.settings["data"]["image_size"])
            self._load_tensors(network, names_of_base)
            adapter.round_base(network)  # such as weights that were fetched again
            network.adapters = merge(network)
        network.begun = self.begun

    def _load_tensors(self, network: RetrievalNetwork, names_of_base: Collection[str]) -> None:
        own = network.state_dict()
        tensors = {
            name: tensor
            for name, tensor in own.items()
            if name.replace(".base_layer.", ".") in names_of_base
        }
        if self.settings["model"].get("projection") is None:
            # A recipe may add a projection to a network that was trained without one; it stays as
            # it was built.
            tensors |= network.head.state_dict(prefix="head.")
        tensors |= self.tensors
        try:
            for name in own.keys() & tensors.keys():
                # An engine may have saved a vector of one number without dimensions.
                if tensors[name].numel() == 1:
                    tensors[name] = tensors[name].reshape(own[name].shape)
            network.load_state_dict(tensors)
        except RuntimeError as error:
            reason = shorten(str(error), 400)  # it lists every tensor that does not fit
            raise DistapError(
                "weights.other_tensors",
                f"{self.where}: its tensors are not those of its network: {reason}",
            ) from error

    def _part(self, kind: str) -> Any:
        return build_recorded(kind, self.settings["model"][kind], self.trusted)

    def _load_base(self, network: RetrievalNetwork, base: dict[str, Any]) -> None:
        """Load the weights that the settings name, and compare them with the record of them."""
        model = self.settings["model"]
        weights_name = ", ".join(str(value) for value in model["weights"].values() if value)
        where = (
            f"{self.where}: its base is {model['backbone']} with the weights of {weights_name}"
            f" (timm {base['timm']})"
        )
        try:
            weights = self._part("weights")
            weights.load(network if getattr(weights, "whole", False) else network.backbone)
        except DistapError as error:
            raise DistapError(error.code, f"{where}: {error}") from error
        expected = base["sha256"]
        digests = digests_of(network)
        changed = sorted(name for name in expected if expected[name] != digests.get(name))
        if changed:
            raise DistapError(
                "network.changed_base",
                f"{where}; here (timm {timm.__version__}) {len(changed)} of its {len(expected)}"
                f" tensors differ: {shorten(', '.join(changed), 150)}. Get those weights, or the"
                " whole network (--format safetensors)",
            )

    def _differing(self, network: RetrievalNetwork) -> dict[str, Any]:
        """Return the settings of the record's section `model` that the network does not have."""
        model = self.settings["model"]
        backbone = model.get("backbone")
        if isinstance(backbone, dict) and backbone.get("name") == GIVEN:
            return {}
        pooling = self._part("pooling")
        pool = (
            pooling.build(network.backbone) if isinstance(pooling, AutoPooling) else pooling.build()
        )
        # To a network without a projection a recipe may add one, which then stays random.
        projection = model["projection"]
        has_projection = not isinstance(network.head, nn.Identity)
        same = {
            "backbone": not isinstance(backbone, str) or _is_backbone(backbone, network),
            "pooling": settings_of(pool) == settings_of(network.pooling),
            "layer_norm": model["layer_norm"] == network.layer_norm,
            "unit_length": (
                projection is None or model["unit_length"] == isinstance(network.head, UnitLinear)
            ),
            "projection": (
                projection is None or (has_projection and projection == network.dimensions)
            ),
        }
        return {key: model[key] for key, is_same in same.items() if not is_same}


def _is_backbone(name: str, network: RetrievalNetwork) -> bool:
    """Return whether a network has the architecture and the pixels of a name that timm knows."""
    config = timm.get_pretrained_cfg(name)
    if config is None:
        return True
    pixels = torch.stack([network.mean, network.std]).flatten(1).cpu() / 255
    difference = (torch.tensor([config.mean, config.std]) - pixels).abs().max()
    return bool(difference <= 1e-6) and config.architecture == architecture_of(network.backbone)


@dataclass(frozen=True)
class RunWeights:
    """Start from a whole trained network: its backbone, pooling and projection.

    Its record names classes of distap, or those that the recipe names too.
    """

    path: str
    """Path or URL of a run or checkpoint, a folder that an export or save_pretrained wrote, or
    `hf-hub:NAME`."""
    best: bool = False
    """Take the run's checkpoint that is best by evaluation.best instead of the newest."""

    whole: ClassVar[bool] = True

    def load(self, network: RetrievalNetwork) -> None:
        try:
            if is_saved(self.path):
                trained = read_saved(self.path)
            else:
                trained = read_checkpoint(self.path, self.best)
            trained.load(network)
        except DistapError as error:
            raise type(error)(error.code, f"model.weights: {error}") from error


def is_saved(source: str) -> bool:
    """Return whether `read_saved` reads a source, a folder or a name on the hub; it is no run."""
    return source.startswith(HUB) or (Path(source) / CONFIG).is_file()


def read_saved(source: str, trusted: bool = False, **download: Any) -> TrainedNetwork:
    """Read a network from the Hugging Face hub, or a folder of `save_pretrained` or an export.

    Args:
        trusted: whether the network's record may name any class.
        download: options of huggingface_hub's snapshot_download.
    """
    name = source.removeprefix(HUB)
    try:
        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, **download))
        settings = dict(read_json(folder / CONFIG)["distap"])
        written = settings.pop("format", SAVED_FORMAT)  # that the first ones did not have
        if written != SAVED_FORMAT:
            raise DistapError(
                "weights.other_version",
                f"{source}: format {written!r} of saved networks, expected {SAVED_FORMAT}: read it"
                " with the version of distap that wrote it",
            )
        model = dict(settings["model"])
        settings["model"] = model
        if settings.get("base") is None:
            backbone = load_file(folder / BACKBONE)
            tensors = {f"backbone.{key}": tensor for key, tensor in backbone.items()}
            tensors |= load_file(folder / HEAD)
            return TrainedNetwork(source, settings, tensors, str(folder), trusted=trusted)
        tensors = load_file(folder / CHANGED)
        if model["adapter"] is not None:
            tensors |= from_peft(load_file(folder / ADAPTERS))
        return TrainedNetwork(source, settings, tensors, str(folder), model, trusted)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DistapError(
            "weights.not_a_network", f"{source}: not a network that distap has saved: {error!r}"
        ) from error


def read_checkpoint(
    source: Path | str, best: bool = False, trusted: bool = False
) -> TrainedNetwork:
    """Read a checkpoint, or a run's newest or best one, on disk or behind a URL.

    A record that is `trusted` may name any class.
    """
    with opened_checkpoint(source, best) as checkpoint:
        logger.info("the network of %s", checkpoint.where)
        state = checkpoint.state("recipe")
        # Optimiser and memory stay on disk. The average, if there is one, replaces the parameters.
        tensors = {
            name.removeprefix(prefix): tensor
            for prefix in (OF_NETWORK, OF_AVERAGE)
            for name, tensor in checkpoint.tensors(prefix).items()
        }
    recipe = state["recipe"]
    folder = state.get("folder")
    weights = recipe["model"]["weights"]
    if folder and not weights.get("path", HUB).startswith(HUB):
        weights = {**weights, "path": from_folder(weights["path"], folder)}
    # The record holds what a hub or folder said of the backbone, so that neither is asked again.
    model = recipe["model"] | state.get("backbone", {})
    return TrainedNetwork(
        checkpoint.where,
        settings=recipe | {"model": model},
        tensors=tensors,
        folder=folder,
        begun=recipe["model"] | {"weights": weights},
        trusted=trusted,
    )
