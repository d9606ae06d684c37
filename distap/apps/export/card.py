"""The model card of an export: the run's records of the network, and code that loads it."""

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

import distap
from distap.checkpoint.manifest import Manifest
from distap.config.recipe import NetworkRecipe
from distap.errors import without_secrets
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.registry import SOURCES
from distap.storage.locations import sets_in_words


def model_card(
    state: dict[str, Any],
    manifest: Manifest,
    recipe: NetworkRecipe,
    describer: ImageDescriber,
    programs: dict[str, float],
    formats: Sequence[str],
) -> str:
    """Return the model card as Markdown, headed by the fields that the Hugging Face hub reads.

    `state` is that of the checkpoint, with its figures and the whole recipe as it was recorded,
    which another version of distap may have written. `programs` are the largest differences of a
    descriptor's component by file.
    """
    settings = state["recipe"]
    loss = settings["loss"]
    terms = loss.get("terms") or [(1, loss)]
    figures = {
        name: {figure: value for figure, value in of_set.items() if math.isfinite(value)}
        for name, of_set in state["figures"].items()
    }
    results = [
        EvalResult("image-retrieval", name, name, figure, round(value, 6))
        for name, of_set in figures.items()
        for figure, value in of_set.items()
    ]
    pretrained = _pretrained(settings["model"])
    tags = ["image-retrieval", "image-feature-extraction", "distap", "timm"]
    if "model.onnx" in programs:
        tags.append("onnx")
    fields = ModelCardData(
        license="unknown",
        library_name="distap",
        pipeline_tag="image-feature-extraction",
        tags=tags,
        base_model=pretrained.get("hf_hub_id"),
        model_name=Path(settings["run"]).name if results else None,
        eval_results=results or None,
    )
    network = describer.retrieval_network
    card = ModelCard.from_template(
        fields,
        template_str=files(__package__).joinpath("card.md").read_text("utf-8"),
        manifest=manifest,
        settings=settings,
        trained_on=sets_in_words(settings["data"]["train"]),
        recipe_yaml=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip(),
        loss=" + ".join(
            term["name"] if weight == 1 else f"{weight:g} {term['name']}" for weight, term in terms
        ),
        recipe=recipe,
        figures=figures,
        describer=describer,
        pretrained=pretrained,
        mean=(network.mean.flatten() / 255).tolist(),
        std=(network.std.flatten() / 255).tolist(),
        programs=programs,
        formats=formats,
        version=distap.__version__,
        torch=torch.__version__,
    )
    return without_secrets(f"{str(card).rstrip()}\n")


def _pretrained(model: dict[str, Any]) -> dict[str, Any]:
    """Return timm's description of the weights that training began with, if they were timm's."""
    name = model["backbone"]
    if model["weights"]["name"] != "timm" or not isinstance(name, str):
        return {}
    if name.startswith(tuple(SOURCES)):
        return {"hf_hub_id": name.removeprefix("hf-hub:")} if name.startswith("hf-hub:") else {}
    config = timm.get_pretrained_cfg(name)
    return {} if config is None else dict(config.to_dict())
