"""Write the model card of an export: what the run recorded about the network, and code that loads it."""

import copy
import math
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from distap.apps.export.checking import Agreement
from distap.apps.export.formats import BackboneFile
from distap.checkpoint.checkpoints import Checkpoint
from distap.config.recipe import NetworkRecipe
from distap.data.shards.load_index import load_index
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.evaluation.saved import Evaluation, folder_of_step, read_evaluation
from distap.model.backbone import SOURCES
from distap.storage.locations import from_folder, parse_source
from distap.storage.redact import without_secrets
from distap.telemetry.runlog import read_run_log, version_with_commit

BEGAN_WITH = {
    "file": "a file of weights",
    "package": "the weights of a package",
    "run": "a trained network",
}


@dataclass(frozen=True)
class TrainingData:
    """The data set that a network was trained on; an unknown field is None."""

    source: str
    fingerprint: str | None
    images: int | None
    classes: int | None


@dataclass(frozen=True)
class Origin:
    """The run that wrote a checkpoint: its figures, data and settings."""

    checkpoint: Path
    step: int
    recipe: NetworkRecipe
    settings: dict[str, Any]  # the whole recipe as it was recorded, which another version of distap may have written
    data: TrainingData
    figures: dict[str, dict[str, float]]  # of this very state by data set, the validation set first
    validation: Evaluation | None  # details of the validation set's figures


def origin_of(checkpoint: Checkpoint, recipe: NetworkRecipe) -> Origin:
    """Read a checkpoint's origin from its run's folder, without figures of other checkpoints."""
    run, state = checkpoint.path.absolute().parent.parent, checkpoint.state("recipe")
    score, settings = checkpoint.manifest.score, state["recipe"]
    data = _data(settings["data"], state.get("folder"), checkpoint.manifest.about.get("data"))
    name = str(settings["data"].get("validation"))
    figures, validation = ({}, None) if score is None else _scored(run, checkpoint.step, score, name)
    return Origin(checkpoint.path, checkpoint.step, recipe, settings, data, figures, validation)


@dataclass(frozen=True)
class Exported:
    """The files that an export wrote, and how closely each agrees with the network."""

    describer: ImageDescriber
    programs: dict[str, Agreement]  # by file
    backbone: BackboneFile | None
    image_size: int  # height and width that the programs were checked with, pixels
    dynamic_size: bool  # whether they take others too


def model_card(origin: Origin, exported: Exported) -> str:
    """Return the card as Markdown, with the fields that the Hugging Face hub reads at its top."""
    settings, loss = copy.deepcopy(origin.settings), origin.settings["loss"]
    # A card is passed on, and these options may hold keys to someone's storage.
    settings["data"]["remote"] = {**settings["data"].get("remote", {}), "options": {}}
    terms = loss.get("terms") or [(1, loss)]
    network = exported.describer.network.network
    mean, std = ((values.flatten() / 255).tolist() for values in (network.mean, network.std))
    card = ModelCard.from_template(
        _card_data(origin, "model.onnx" in exported.programs),
        template_str=files(__package__).joinpath("card.md").read_text("utf-8"),
        origin=origin,
        exported=exported,
        whitening=exported.describer.whitening,
        weights=_weights(origin),
        began_with=BEGAN_WITH,
        pretrained=_pretrained(origin),
        mean=mean,
        std=std,
        loss=" + ".join(f"{weight:g} {part['name']}" for weight, part in terms),
        recipe_yaml=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip(),
        version=version_with_commit(),
        torch=torch.__version__,
    )
    return without_secrets(f"{str(card).rstrip()}\n")


def _card_data(origin: Origin, has_onnx: bool) -> ModelCardData:
    tags = ["image-retrieval", "image-feature-extraction", "distap", "timm", *(["onnx"] if has_onnx else [])]
    results = [
        EvalResult("image-retrieval", name, name, figure, round(value, 6))
        for name, of_set in origin.figures.items()
        for figure, value in of_set.items()
    ]
    return ModelCardData(
        license="unknown",
        library_name="distap",
        pipeline_tag="image-feature-extraction",
        tags=tags,
        base_model=_pretrained(origin).get("hf_hub_id"),
        model_name=Path(origin.settings["run"]).name if results else None,
        eval_results=results or None,
    )


def _pretrained(origin: Origin) -> dict[str, Any]:
    """Return timm's description of the weights that training began with, if they were timm's."""
    name = origin.settings["model"]["backbone"]
    if _weights(origin) != "timm" or not isinstance(name, str):
        return {}
    if name.startswith(tuple(SOURCES)):
        return {"hf_hub_id": name.removeprefix("hf-hub:")} if name.startswith("hf-hub:") else {}
    config = timm.get_pretrained_cfg(name)
    return {} if config is None else dict(config.to_dict())


def _weights(origin: Origin) -> str:
    return str(origin.settings["model"]["weights"]["name"])


def _data(data: dict[str, Any], folder: str | None, fingerprint: Any) -> TrainingData:
    text, images, classes = str(data["train"]), None, None
    with suppress(DistapError):
        index_at = data.get("train_index") and Path(from_folder(data["train_index"], folder or "."))
        source = parse_source(from_folder(text, folder or "."), index_at)
        if not source.scheme:
            index = load_index(source, compare=False)
            if index.fingerprint == fingerprint:
                images, classes = len(index), len(set(index.label[index.label >= 0].tolist()))
    return TrainingData(text, None if fingerprint is None else str(fingerprint), images, classes)


def _scored(run: Path, step: int, score: float, name: str) -> tuple[dict[str, dict[str, float]], Evaluation | None]:
    def is_score(figure: float | None) -> bool:  # ranks exchange a checkpoint's score in float64
        return figure is not None and math.isclose(figure, score, rel_tol=0, abs_tol=1e-9)

    figures: dict[str, dict[str, float]] = {name: {"mAP": score}}
    with suppress(DistapError):
        for line in read_run_log(run):
            if line["step"] == step and is_score(line.get("validation", {}).get("mAP")):
                sets = {name: line["validation"], **line.get("also", {})}
                # The log says null of figures that are not finite.
                figures = {of: {k: v for k, v in known.items() if v is not None} for of, known in sets.items()}
    with suppress(DistapError):
        validation = read_evaluation(folder_of_step(run, step))
        if is_score(validation.figures.get("mAP")):
            return figures, validation
    return figures, None
