"""Export a checkpoint into a folder, in one step, after comparing every file with the network."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import distap
from distap.apps.export.card import model_card, origin_of
from distap.apps.export.formats import (
    cases_of,
    difference,
    exportable,
    missing_for_onnx,
    onnx_describer,
    program_of,
    save_onnx,
    save_program,
)
from distap.checkpoint.finding import opened_checkpoint
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.model.multiscale import required_size
from distap.storage.atomic import refuse_foreign, replacing_folder
from distap.training.build import describing_of, trained_network
from distap.training.descriptor_network import DescriptorNetwork
from distap.world import World

PROGRAMS: dict[str, tuple[str, Any, Any]] = {  # by format: the file, what writes it, and what loads it
    "pt2": ("model.pt2", save_program, lambda path: torch.export.load(path).module()),
    "onnx": ("model.onnx", save_onnx, onnx_describer),
}
EXPORT_FORMATS = (*PROGRAMS, "safetensors", "adapter")
EARLIER_EXPORT = {  # by an earlier export, which is replaced
    *("model.pt2", "model.onnx", "model.onnx.data", "README.md"),
    *("config.json", "head.safetensors", "model.safetensors"),
    *("adapter_config.json", "adapter_model.safetensors", "changed.safetensors"),
}


def export_to_folder(
    checkpoint: Path | str,
    output: Path,
    formats: Sequence[str] = (),
    whitening: Path | None = None,
    best: bool = False,
    *,
    dynamic_size: bool = False,
    overrides: Sequence[str] = (),
) -> tuple[ImageDescriber, dict[str, float]]:
    """Write a checkpoint's network in several formats, and a model card, which describes them.

    Return what describes images, and by program the largest difference of a component of its descriptors. Nothing is
    left behind if the network cannot be exported or a file differs from it.

    Args:
        checkpoint: a run folder, one of its checkpoints, or the URL of either.
        output: a new folder, an empty one, or that of an earlier export, which is replaced.
        formats: of EXPORT_FORMATS; none takes all but `adapter`, and onnx where it is installed.
        whitening: a file of `distap whiten`, applied last.
        best: with a run folder, take its best checkpoint, not its newest.
        dynamic_size: let programs take images of any size; otherwise only those of the recipe's crop, or of
            data.image_size if the recipe takes whole images.
        overrides: changes of the recipe, such as `evaluation.scales=[1,0.7]`.
    """
    formats = formats or [each for each in EXPORT_FORMATS[:-1] if each != "onnx" or not missing_for_onnx()]
    if unknown := set(formats) - set(EXPORT_FORMATS):
        raise DistapError(f"--format {min(unknown)!r}: expected {', '.join(EXPORT_FORMATS)}")
    if {"adapter", "safetensors"} <= set(formats):
        raise DistapError("--format adapter and safetensors write the same files; choose one")
    if "onnx" in formats and (missing := missing_for_onnx()):
        needed = f"--format onnx needs {', '.join(missing)}"
        raise DistapError(f"{needed}, not installed here: pip install 'distap[onnx]', or leave the format out")
    output = output.resolve()
    refuse_foreign(output, EARLIER_EXPORT)
    with opened_checkpoint(checkpoint, best) as found:
        # Take this checkpoint's own path, since a training may write a newer one meanwhile.
        recipe, network = trained_network(found.path, World(), overrides=overrides)
        origin = origin_of(found, recipe)
    sizing = recipe.sizing if dynamic_size or "crop" in recipe.sizing else f"crop {recipe.data.image_size}"
    if dynamic_size and (required := required_size(network)) is not None:
        name = recipe.model.architecture
        raise DistapError(f"--dynamic-size: {name} takes images of {required[1]} x {required[0]} pixels only")
    describer = describing_of(recipe, network, World(), sizing, whitening=whitening).describer
    image_size, several = describer.sizing.pixels or recipe.data.image_size, describer.network.eval()
    about = {"distap": json.dumps({"version": distap.__version__, "described_by": asdict(describer.described_by)})}
    programs = dict[str, float]()
    with replacing_folder(output) as folder:
        if chosen := [PROGRAMS[each] for each in PROGRAMS if each in formats]:
            program = program_of(exportable(several), image_size, dynamic_size)
            cases = cases_of(several, image_size, dynamic_size)
            for name, save, load in chosen:
                save(program, folder / name, about)
                programs[name] = difference(name, load(folder / name), cases)
        if {"adapter", "safetensors"} & set(formats):
            DescriptorNetwork(describer, recipe).write(folder, changes_only="adapter" in formats)
        (folder / "README.md").write_text(model_card(origin, describer, programs, formats, dynamic_size), "utf-8")
    return describer, programs
