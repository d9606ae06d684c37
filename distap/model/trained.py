"""Read a trained network from a run, checkpoint, saved folder or hub; start a training from one."""

import json
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

# Files of a saved folder: of a whole network, or of what training changed.
CONFIG = "config.json"
BACKBONE = "model.safetensors"
HEAD = "head.safetensors"
ADAPTERS = "adapter_model.safetensors"
CHANGED = "changed.safetensors"
HUB = "hf-hub:"
# prefixes of its tensors in a checkpoint
OF_NETWORK = "network."
OF_AVERAGE = "ema."


@dataclass(frozen=True)
class TrainedNetwork:
    """The tensors of a trained network, and the record saved with them."""

    whole: ClassVar[bool] = True  # see `build_network`
    where: str  # for messages
    # a recipe, or the `distap` section of config.json; either has a section `model`
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: str | None = None  # that relative paths of the recipe were relative to
    begun: dict[str, Any] | None = None  # section `model` of the recipe, which names the base
    trusted: bool = False  # whether its record may name classes that are not distap's

    def load(self, network: RetrievalNetwork) -> None:
        """Load the network, merging its adapters; a DistapError names each required key that
        differs.
        """
        others = self._others(network)
        if others:
            raise DistapError(
                f"{self.where}: this network is not the recipe's; to begin from it, the recipe"
                " needs\n"
                + "\n".join(f"  model.{key}: {json.dumps(value)}" for key, value in others.items())
                + "\nFor its backbone alone, `distap export --format safetensors` it and set"
                f" model.weights to {{name: file, path: FOLDER/{BACKBONE}}}"
            )
        model = self.settings["model"]
        base = self.settings.get("base")
        if base is not None:
            self._load_base(network, base)
        adapter = model.get("adapter")
        if adapter is not None:
            self._part("adapter").adapt(network, self.settings["data"]["image_size"])
        state = network.state_dict()
        unchanged = {} if base is None else base["sha256"]
        kept = {
            name: one
            for name, one in state.items()
            if name.replace(".base_layer.", ".") in unchanged
        }
        if model.get("projection") is None:
            # A recipe may add a projection to a network that was trained without one; it stays as
            # it was built.
            kept |= network.head.state_dict(prefix="head.")
        try:
            # An engine may have saved a vector of one number without dimensions.
            single = {
                name: one
                for name, one in self.tensors.items()
                if one.numel() == 1 and name in state
            }
            own = {name: one.reshape(state[name].shape) for name, one in single.items()}
            network.load_state_dict({**kept, **self.tensors, **own})
        except RuntimeError as error:
            why = shorten(str(error), 400)  # it lists every tensor that does not fit
            raise DistapError(
                f"{self.where}: its tensors are not those of its network: {why}"
            ) from error
        network.adapters = {} if adapter is None else merge(network)
        network.begun = self.begun

    def _part(self, kind: str) -> Any:
        return build_recorded(kind, self.settings["model"][kind], self.trusted)

    def _load_base(self, network: RetrievalNetwork, base: dict[str, Any]) -> None:
        """Load the weights that the settings name, and compare them with the record that was saved
        of them.
        """
        model = self.settings["model"]
        known = base["sha256"]
        of = ", ".join(str(value) for value in model["weights"].values() if value)
        named = (
            f"{self.where}: its base is {model['backbone']} with the weights of {of} (timm"
            f" {base['timm']})"
        )
        try:
            weights = self._part("weights")
            weights.load(network if getattr(weights, "whole", False) else network.backbone)
        except DistapError as error:
            raise DistapError(f"{named}: {error}") from error
        found = digests_of(network)
        others = sorted(name for name in known if known[name] != found.get(name))
        if others:
            raise DistapError(
                f"{named}; here (timm {timm.__version__}) {len(others)} of its {len(known)} tensors"
                f" differ: {shorten(', '.join(others), 150)}. Get those weights, or the whole"
                " network (--format safetensors)"
            )

    def _others(self, network: RetrievalNetwork) -> dict[str, Any]:
        """Return what the network has in place of what the recipe's section `model` says, by
        key."""
        model = self.settings["model"]
        others = dict[str, Any]()
        backbone = model.get("backbone")
        wanted = model["projection"]
        if isinstance(backbone, dict) and backbone.get("name") == GIVEN:
            return others
        about = timm.get_pretrained_cfg(backbone) if isinstance(backbone, str) else None
        if about is not None:
            own = torch.stack([network.mean, network.std]).flatten(1).cpu() / 255
            of_pixels = torch.tensor([about.mean, about.std]).sub(own).abs().max() > 1e-6
            if of_pixels or about.architecture != architecture_of(network.backbone):
                others["backbone"] = backbone
        pooling = self._part("pooling")
        built = (
            pooling.build(network.backbone) if isinstance(pooling, AutoPooling) else pooling.build()
        )
        dimensions = None if isinstance(network.head, nn.Identity) else network.dimensions
        same = {
            "pooling": settings_of(built) == settings_of(network.pooling),
            "layer_norm": model["layer_norm"] == network.layer_norm,
            # To a network without a projection a recipe may add one, which then stays random.
            "unit_length": (
                wanted is None or model["unit_length"] == isinstance(network.head, UnitLinear)
            ),
            "projection": wanted in (None, dimensions),
        }
        return others | {key: model[key] for key, is_same in same.items() if not is_same}


@dataclass(frozen=True)
class RunWeights:
    """Start from a whole trained network: its backbone, pooling and projection.

    Its record names classes of distap, or those that the recipe names too.
    """

    path: str
    """Path or URL of a run or checkpoint, a folder that an export or save_pretrained wrote, or
    `hf-hub:NAME`."""
    best: bool = False
    """Take the run's checkpoint with the highest validation mAP instead of the newest."""

    whole: ClassVar[bool] = True

    def load(self, network: RetrievalNetwork) -> None:
        try:
            is_elsewhere = is_saved(self.path)
            (read_saved(self.path) if is_elsewhere else read_checkpoint(self.path, self.best)).load(
                network
            )
        except DistapError as error:
            raise type(error)(f"model.weights: {error}") from error


def is_saved(source: str) -> bool:
    """Tell whether a source is a saved network (a folder or a hub name) for `read_saved`, and no
    run.
    """
    return source.startswith(HUB) or (Path(source) / CONFIG).is_file()


def read_saved(source: str, trusted: bool = False, **download: Any) -> TrainedNetwork:
    """Read a network from the Hugging Face hub, or from a folder of `save_pretrained` or `distap
    export`.

    `download` are options of huggingface_hub's snapshot_download. A record that is `trusted` may
    name any class.
    """
    name = source.removeprefix(HUB)
    try:
        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, **download))
        settings = dict(read_json(folder / CONFIG)["distap"])
        settings["model"] = dict(settings["model"])
        if settings.get("base") is not None:
            adapters = (
                {}
                if settings["model"]["adapter"] is None
                else from_peft(load_file(folder / ADAPTERS))
            )
            tensors = load_file(folder / CHANGED) | adapters
            return TrainedNetwork(
                source, settings, tensors, str(folder), settings["model"], trusted
            )
        tensors = {
            f"backbone.{key}": tensor for key, tensor in load_file(folder / BACKBONE).items()
        }
        return TrainedNetwork(
            source, settings, tensors | load_file(folder / HEAD), str(folder), trusted=trusted
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DistapError(f"{source}: not a network that distap has saved: {error!r}") from error


def read_checkpoint(
    source: Path | str, best: bool = False, trusted: bool = False
) -> TrainedNetwork:
    """Read a checkpoint, or a run's newest or best one, on disk or behind a URL.

    A record that is `trusted` may name any class.
    """
    with opened_checkpoint(source, best) as checkpoint:
        logger.info("the network of %s", checkpoint.where)
        state = checkpoint.state("recipe")
        # Optimiser and memory stay on disk.
        tensors = {
            name.removeprefix(prefix): tensor  # the average replaces the parameters
            for prefix in (OF_NETWORK, OF_AVERAGE)
            for name, tensor in checkpoint.tensors(prefix).items()
        }
    # The record holds what a hub or folder said of the backbone, so that neither is asked again.
    recipe = state["recipe"]
    folder = state.get("folder")
    weights = recipe["model"]["weights"]
    if folder and not weights.get("path", HUB).startswith(HUB):
        weights = {**weights, "path": from_folder(weights["path"], folder)}
    begun = {**recipe["model"], "weights": weights}
    model = {**recipe["model"], **state.get("backbone", {})}
    return TrainedNetwork(
        checkpoint.where, {**recipe, "model": model}, tensors, folder, begun, trusted
    )
