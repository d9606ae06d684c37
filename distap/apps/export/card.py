"""Write the model card beside an export: the run's knowledge of the network, and code that loads it."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import timm
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

import distap
from distap.apps.export.backbone import BackboneFile
from distap.apps.export.checking import Agreement
from distap.apps.export.origin import Origin
from distap.apps.export.programs import Range
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.registry import name_of
from distap.retrieval.whitening import Whitening
from distap.storage.redact import without_secrets

CARD_FILE = "README.md"


def model_card(
    describer: ImageDescriber,
    origin: Origin,
    programs: Mapping[str, Agreement],
    backbone: BackboneFile | None,
    sizes: tuple[Range, Range],
    whitening: Whitening | None,
) -> str:
    """Return the card as Markdown, with the fields that the Hugging Face hub reads at its top.

    Args:
        programs: agreement of each file with the network.
        backbone: how timm loads the backbone's weights, if they were written.
        sizes: heights and widths that the programs take.
    """
    settings = origin.recipe.model_dump(mode="json")
    settings["data"]["remote"]["options"] = {}  # a card is passed on, and these may hold keys to someone's storage
    terms = settings["loss"].get("terms") or [(1, settings["loss"])]
    network = describer.network.network
    mean, std = ((values.flatten() / 255).tolist() for values in (network.mean, network.std))
    card = ModelCard.from_template(
        _card_data(origin, "model.onnx" in programs),
        template_str=files(__package__).joinpath("card.md").read_text("utf-8"),
        origin=origin,
        describer=describer,
        programs=programs,
        backbone=backbone,
        sizes=sizes,
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
