"""Log what a training is about to do: its data, evaluations, network, device, batch and run."""

import shutil

import torch
from torch.distributed.tensor import DTensor

from distap.config.evaluation_sections import MERGED
from distap.config.recipe import Recipe
from distap.data.joined import MixedIndex
from distap.data.shards.index import Index
from distap.errors import logger
from distap.evaluation.evaluation_set import EvaluationSet
from distap.evaluation.several_sets import merged_sets
from distap.registry import name_of
from distap.training.prepared import Prepared
from distap.world import DRIVER, without_gpu


def announce(prepared: Prepared, step: int | None, device: torch.device, ranks: int) -> None:
    """Log what trains from `step` on, in a line for each subject.

    `step` is None for that of the newest checkpoint.
    """
    recipe = prepared.report.recipe
    length = prepared.length
    network = prepared.network
    trained = sum(
        parameter.numel() for parameter in network.parameters() if parameter.requires_grad
    )
    lines = {
        "data": _data(recipe, prepared.images.index, length.steps),
        "evaluation": _evaluation(recipe, prepared.sets, step),
        "network": f"{recipe.model.architecture}, {trained:,} parameters,"
        f" {network.dimensions} dimensions",
        "device": f"{device.type}, {ranks} ranks" if ranks > 1 else str(device),
        "engine": _engine(prepared, ranks),
        "batch": _batch(recipe, prepared.images.size, length.steps, float(length.epoch)),
        "run": f"{recipe.run}, {_beginning(step)}",
    }
    for subject, line in lines.items():
        logger.info("%-10s  %s", subject, line)
    if length.warmup > length.steps:
        logger.warning(
            "schedule.warmup is longer than the training: the rate reaches %.2g of"
            " optimizer.learning_rate",
            length.steps / length.warmup,
        )
    has_driver = DRIVER.exists() or shutil.which("nvidia-smi") is not None
    if device.type == "cpu" and recipe.device == "auto" and has_driver:
        logger.warning("%s, so it trains on the CPU; device=cuda would refuse that", without_gpu())


def _engine(prepared: Prepared, ranks: int) -> str:
    """Return how the ranks share out the network, and the loss's classes."""
    recipe = prepared.report.recipe
    keys = [f"{key}: {value}" for key, value in vars(recipe.engine).items()]
    line = ", ".join([name_of("engine", recipe.engine), *keys])
    learned = prepared.step.stages.loss.learned
    shared = [] if learned is None else [*learned.parameters()]
    rows = sum(len(parameter) for parameter in shared if isinstance(parameter, DTensor))
    return f"{line}; {rows:,} classes over {ranks} ranks" if rows else line


def _data(recipe: Recipe, index: Index | MixedIndex | None, steps: int) -> str:
    line = recipe.data.train_name
    if index is not None:
        line += f": {len(index):,} images of {len(index.class_name):,} classes"
    for settings in recipe.data.train_sets.values():
        for name, folder in settings.rows.items():
            line += f", {name} from {folder}"
    if recipe.data.image_sizes:
        for share, size in recipe.data.sizes:
            line += f", {size} px from step {round(share * steps) + 1:,} on"
    return line


def _evaluation(recipe: Recipe, sets: dict[str, EvaluationSet], step: int | None) -> str:
    evaluation = recipe.evaluation
    if recipe.data.validation is None:
        return "none, since data.validation is not set"
    if not sets:
        return "none, since evaluation.every is 0"
    begins = "before the first step and " if evaluation.at_start and step == 0 else ""
    line = ", ".join(sets)
    if evaluation.merged:
        line += f", {MERGED} of {', '.join(merged_sets(sets))}"
    line += f", {begins}after the last"
    return f"{line}, and every {evaluation.every} {evaluation.unit}" if evaluation.every else line


def _batch(recipe: Recipe, size: int, steps: int, epoch: float) -> str:
    batch = f"{size:,} images by {name_of('sampling', recipe.sampling)}; "
    if epoch:
        batch += f"an epoch is {epoch:.3g} steps, the training {steps / epoch:.3g} epochs or "
    return f"{batch}{steps:,} steps"


def _beginning(step: int | None) -> str:
    if step is None:
        return "from its newest checkpoint"
    return f"from step {step}" if step else "from the start"
