"""Write the model card of an export: what the run recorded about the network, and code that loads
it.
"""

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
    loss = state["recipe"]["loss"]
    figures = {
        of: {k: v for k, v in each.items() if math.isfinite(v)}
        for of, each in state["figures"].items()
    }
    terms = loss.get("terms") or [(1, loss)]
    pretrained = _pretrained(settings["model"])
    network = describer.retrieval_network
    mean, std = ((values.flatten() / 255).tolist() for values in (network.mean, network.std))
    has_onnx = "model.onnx" in programs
    results = [
        EvalResult("image-retrieval", name, name, figure, round(value, 6))
        for name, of_set in figures.items()
        for figure, value in of_set.items()
    ]
    fields = ModelCardData(
        license="unknown",
        library_name="distap",
        pipeline_tag="image-feature-extraction",
        tags=[
            "image-retrieval",
            "image-feature-extraction",
            "distap",
            "timm",
            *(["onnx"] if has_onnx else []),
        ],
        base_model=pretrained.get("hf_hub_id"),
        model_name=Path(settings["run"]).name if results else None,
        eval_results=results or None,
    )
    recipe_yaml = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip()
    named = " + ".join(f"{weight:g} {part['name']}" for weight, part in terms)
    of_run: dict[str, Any] = {
        "manifest": manifest,
        "settings": settings,
        "recipe_yaml": recipe_yaml,
        "loss": named,
    }
    of_run |= {"recipe": recipe, "figures": figures}
    of_network: dict[str, Any] = {
        "describer": describer,
        "pretrained": pretrained,
        "mean": mean,
        "std": std,
    }
    of_files: dict[str, Any] = {"programs": programs, "formats": formats}
    versions = {"version": distap.__version__, "torch": torch.__version__}
    template = files(__package__).joinpath("card.md").read_text("utf-8")
    card = ModelCard.from_template(
        fields, template_str=template, **of_run, **of_network, **of_files, **versions
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
