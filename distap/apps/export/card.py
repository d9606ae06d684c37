"""Write the model card beside an export: what the run recorded about the network, and code that loads it."""

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

import distap
from distap.apps.export.checking import Agreement, Range
from distap.apps.export.formats import BackboneFile
from distap.checkpoint.folder import Checkpoint
from distap.config.recipe import Recipe
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.evaluation.saved import SavedEvaluation, folder_of_step, read_evaluation
from distap.registry import name_of
from distap.retrieval.whitening import Whitening
from distap.storage.redact import without_secrets
from distap.telemetry.runlog import read_run_log


@dataclass(frozen=True)
class TrainingData:
    """The data set that a network was trained on; None for what is not known."""

    source: str
    fingerprint: str | None
    images: int | None
    classes: int | None


@dataclass(frozen=True)
class Origin:
    """The run behind a checkpoint."""

    checkpoint: Path
    step: int
    recipe: Recipe
    data: TrainingData
    figures: dict[str, dict[str, float]]  # of this very state by data set, the validation set first
    validation: SavedEvaluation | None  # details of the validation set's figures


def origin_of(checkpoint: Checkpoint, recipe: Recipe) -> Origin:
    """Read a checkpoint's origin from its run's folder; figures of another state are left out."""
    run = checkpoint.path.absolute().parent.parent
    score = checkpoint.manifest.score
    data = _data(recipe, checkpoint.manifest.about.get("data"))
    figures, validation = ({}, None) if score is None else _scored(run, checkpoint.step, score, recipe)
    return Origin(checkpoint.path, checkpoint.step, recipe, data, figures, validation)


@dataclass(frozen=True)
class Exported:
    """The written files, and how near to the network they are."""

    describer: ImageDescriber
    programs: dict[str, Agreement]  # by file
    backbone: BackboneFile | None
    sizes: tuple[Range, Range]  # heights and widths that the programs take


def model_card(origin: Origin, exported: Exported, whitening: Whitening | None) -> str:
    """Return the card as Markdown, with the fields that the Hugging Face hub reads at its top."""
    settings = origin.recipe.model_dump(mode="json")
    settings["data"]["remote"]["options"] = {}  # a card is passed on, and these may hold keys to someone's storage
    terms = settings["loss"].get("terms") or [(1, settings["loss"])]
    network = exported.describer.network.network
    mean, std = ((values.flatten() / 255).tolist() for values in (network.mean, network.std))
    card = ModelCard.from_template(
        _card_data(origin, "model.onnx" in exported.programs),
        template_str=files(__package__).joinpath("card.md").read_text("utf-8"),
        origin=origin,
        exported=exported,
        whitening=whitening,
        weights=name_of("weights", origin.recipe.model.weights),
        pretrained=_pretrained(origin),
        mean=mean,
        std=std,
        loss=" + ".join(f"{weight:g} {part['name']}" for weight, part in terms),
        recipe_yaml=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip(),
        version=distap.__version__,
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
        model_name=origin.recipe.run.name if results else None,
        eval_results=results or None,
    )


def _pretrained(origin: Origin) -> dict[str, Any]:
    """Return timm's description of the weights that training began with, if they were timm's."""
    model = origin.recipe.model
    config = timm.get_pretrained_cfg(model.architecture) if name_of("weights", model.weights) == "timm" else None
    return {} if config is None else dict(config.to_dict())


def _data(recipe: Recipe, fingerprint: Any) -> TrainingData:
    source = recipe.data.train_source
    images = classes = None
    if not source.scheme:
        with suppress(DistapError):
            index = load_index(source, compare=False)
            if index.fingerprint == fingerprint:
                images, classes = len(index), len(set(index.label[index.label >= 0].tolist()))
    return TrainingData(str(source), None if fingerprint is None else str(fingerprint), images, classes)


def _scored(
    run: Path, step: int, score: float, recipe: Recipe
) -> tuple[dict[str, dict[str, float]], SavedEvaluation | None]:
    name = str(recipe.data.validation)
    figures: dict[str, dict[str, float]] = {name: {"mAP": score}}
    with suppress(DistapError):
        for line in read_run_log(run):
            if line.get("step") == step and _is(line.get("validation", {}).get("mAP"), score):
                sets = {name: line["validation"], **line.get("also", {})}
                # The log says of some figures that they are no number.
                figures = {of: {k: float(v) for k, v in known.items() if _is_number(v)} for of, known in sets.items()}
    with suppress(DistapError):
        validation = read_evaluation(folder_of_step(run, step))
        if _is(validation.figures.get("mAP"), score):
            return figures, validation
    return figures, None


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int)


def _is(figure: Any, score: float) -> bool:
    """Tell whether a figure is the checkpoint's score, which ranks exchange in float64."""
    return _is_number(figure) and math.isclose(figure, score, rel_tol=0, abs_tol=1e-9)
