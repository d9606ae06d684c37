"""The Python API: train, and load a network."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from distap.config.reading import load_recipe
from distap.data.map_style import source_of
from distap.data.shards.parallel import untracked
from distap.errors import FINISHED, DistapError, checked
from distap.evaluation.describing import describing_of
from distap.model.network import GivenNetwork
from distap.model.trained import HUB, is_saved
from distap.ranking.losses.building import AnyLoss, build_loss
from distap.telemetry.terminal import track
from distap.trainer import trained
from distap.training.build import GIVEN_PARTS, trained_network
from distap.training.descriptor_network import DescriptorNetwork
from distap.world import World, refuse_default_device


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

    The run goes on from its newest checkpoint, if there is one. Under torchrun each rank calls
    this. It joins the ranks by itself, and handles SIGTERM and SIGINT as `distap train` does: it
    then writes a checkpoint and raises SystemExit(75). The record of the run has the class of an
    object; `load` needs a network like it.

    Args:
        recipe: a YAML file, or a dict of a recipe's keys and values.
        overrides: changes to the recipe, with dotted keys (`optimizer.learning_rate`) or nested
            dicts. A dict with a `name` replaces the part that was chosen before.
        network: takes images (n, 3, height, width), float32, with sides of data.image_size pixels,
            and gives descriptors (n, C), which are then scaled to length 1. Pixels are normalised
            by the `mean` and `std` of its `pretrained_cfg`, as timm's networks have them; other
            networks get them from 0 to 1. BatchNorm is as model.batchnorm says, frozen by default.
            It is trained in place, unless an engine on several ranks shares its parameters out. A
            network of `load` may be given too, to train it on.
        loss: a name, a Loss or its class, or a function of (descriptors, labels), as `Multistage`
            takes them.
        data: images to train on, see `source_of`; or a dict of `train`, `validation` and
            `gallery`, of which the first two may be dicts of several data sets by name. The
            recipe's sampling draws batches of them, and its augmentation varies them.
    Raises:
        DistapError: a key, a value or an object is wrong, or the training failed; the message says
            what to do.
    """
    refuse_default_device()
    if threading.current_thread() is not threading.main_thread():
        raise DistapError(
            "run.not_in_main_thread",
            "distap.train listens for signals, so call it in the main thread",
        )
    if torch.distributed.is_initialized():
        raise DistapError(
            "ranks.joined_already",
            "distap.train joins the ranks by itself; call it before torch.distributed is"
            " initialised",
        )
    objects: dict[str, Any] = {} if loss is None else {"loss": build_loss(loss)}
    if network is not None:
        objects |= dict.fromkeys(
            (f"model.{key}" for key in GIVEN_PARTS), GivenNetwork(_trainable(network))
        )
    objects |= _sources(data)
    chosen = load_recipe(
        recipe if isinstance(recipe, Mapping) else Path(recipe), [{**(overrides or {}), **objects}]
    )
    # A notebook may have turned gradients off for everything that is not training.
    with torch.inference_mode(False), torch.enable_grad(), trained(chosen) as status:
        pass
    if status != FINISHED:
        raise SystemExit(status)
    return chosen.run


def _trainable(network: nn.Module) -> nn.Module:
    """Return the module to train: of a network of `load`, the one inside."""
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise DistapError(
            "network.nothing_to_train",
            f"network: {type(network).__name__} has no parameter that requires a gradient",
        )
    if isinstance(network, DescriptorNetwork):
        return network.describer.retrieval_network
    return network


def _sources(data: Any) -> dict[str, Any]:
    """Return the recipe's keys for images in Python, with their sources."""
    if data is None:
        return {}
    sets = data if isinstance(data, Mapping) else {"train": data}
    unknown = sets.keys() - {"train", "validation", "gallery"}
    if unknown:
        raise DistapError(
            "data.unknown_set",
            f"data: it has {', '.join(map(str, unknown))}; expected train, validation and gallery",
        )
    shows = track if os.environ.get("RANK", "0") == "0" else untracked

    def source(images: Any) -> Any:
        if isinstance(images, Mapping):
            return {name: source(of_set) for name, of_set in images.items()}
        return source_of(images, shows)

    return {f"data.{name}": source(images) for name, images in sets.items()}


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
    trust: bool = False,
) -> DescriptorNetwork:
    """Load a trained network for use.

    Args:
        source: a run, one of its checkpoints, the URL of either, a folder that `save_pretrained` or
            `distap export` wrote, or `hf-hub:NAME`. The options best, sizing, scales and whitening
            are for runs and checkpoints; the others have their own.
        best: take a run's best checkpoint instead of its newest.
        sizing: `crop N`, `resize M crop N`, `resize HxW crop N`, `side N` or `original`, in
            pixels; None takes the recipe's.
        scales: factors of an image's size at which it is described; None takes the recipe's.
        whitening: a result of `distap whiten`.
        device: None takes a GPU if there is one.
        network: a network built like the one given to `train`; it gets the trained parameters.
        trust: import classes that are not distap's if the network's record names some, which runs
            their code, and read an architecture from the hub or folder that it names.
    Raises:
        DistapError: there is no such network, it is damaged, or `network` is missing or does not
            fit.
    """
    refuse_default_device()
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # torch.device accepts the number of a GPU that is not there; only an allocation fails.
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise DistapError(
            "ranks.no_device", f"device: {device!r} cannot be used: {shorten(str(error), 200)}"
        ) from error
    name = str(source)
    if is_saved(name):
        if best or sizing or scales or whitening:
            raise DistapError(
                "network.options_of_runs",
                f"{name}: best, sizing, scales and whitening are for runs; what was saved has"
                " its own",
            )
        try:
            saved: DescriptorNetwork = DescriptorNetwork.from_pretrained(
                name.removeprefix(HUB), device=place, network=network, trust=trust
            )
        except (OSError, ValueError) as error:  # of huggingface_hub
            raise DistapError(
                "network.not_found", f"{name}: no network can be loaded from there: {error}"
            ) from error
        return saved
    world = World(device=place)
    recipe, whole = trained_network(source, world, best, network=network, trusted=trust)
    wanted = None if scales is None else [*map(float, scales)]
    describing = describing_of(recipe, whole, world, sizing, wanted, whitening=whitening)
    loaded = DescriptorNetwork(describing.describer, recipe)
    loaded.trusts = trust
    return loaded
