"""Predict the cost of a recipe's steps for several numbers of GPUs, as tables and as JSON."""

import math
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.plan.cards import machine_of
from benchmarks.plan.measuring import Trial
from benchmarks.plan.network_cost import changed, network_cost
from benchmarks.plan.step_cost import StepCost, bins_of
from distap.config.recipe import Recipe
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.registry import name_of
from distap.telemetry.terminal import text_table
from distap.training.rank_memory import engines_of
from distap.training.schedule import Length
from distap.world import joined_world

ROUNDS = 5  # of a measurement
HEADINGS = (
    "GPUs",
    "images",
    "s/step",
    "images/s",
    "efficient",
    "waits",
    "hours",
    "GB",
    "micro-batch",
    "keep",
)
SUMMARY = (
    "{gpus:,}|{images_a_gpu:,}|{seconds_a_step:.3g}|{images_per_second:,.0f}|{efficiency:.0%}|"
)
SUMMARY += (
    "{communication_share:.1%}|{hours:,.3g}|{gb:.2f}{mark}|{greatest_replay_size}|{greatest_keep}"
)
# photographs of a megapixel a second of a core, measured to 224 px
DECODED_WHOLE = 157
DECODED_REDUCED = 277
REDUCED_SIDE = 500  # pixels up to which such a photograph is decoded at half scale
RANK_BYTES = 4e9  # of the host's memory, beside pixels
CAPTION = (
    "images, GB: of a GPU, with a ! if it is too much. efficient: relative to one GPU. waits: share"
    " of a step that a GPU waits for others. micro-batch, keep: the most that fit."
)

ENGINES_CAPTION = (
    "By the recipe's replay.size without kept graphs, with a ! if it is too much. The first that"
    " fits sends the fewest messages."
)


def planned_steps(recipe: Recipe, batch: int) -> int:
    """Return the steps of a training before its start.

    Raise a DistapError for epochs of missing images.
    """
    if recipe.steps is not None:
        return recipe.steps
    try:
        return Length(recipe, load_index(recipe.data.train_source, compare=False), batch).steps
    except DistapError as error:
        raise DistapError(
            "data.not_counted", f"epochs: the images cannot be counted, so set steps=N: {error}"
        ) from error


def cost_plan(
    recipe: Recipe, batch: int, ranks: list[int], link: float, gpus_a_host: int, card: str | None
) -> dict[str, Any] | None:
    """Return `network` and `assumptions` in words, and `steps`, the figures for each number of GPUs
    in `ranks`.

    The figures come from the data sheet of `card` or, if that is None, from a measurement, which
    only rank 0 gets. `link` is the bytes per second of a host's network.
    """
    try:
        length = float(planned_steps(recipe, batch))
        notes = []
    except DistapError as error:
        length = math.nan
        notes = [f"hours are unknown: {error}"]
    network = network_cost(recipe)
    if card is not None:
        machine = machine_of(card, network, recipe, link, gpus_a_host)
        basis = (
            f"{card} by its data sheet, of which nothing was measured; savings such as compilation"
            " do not count"
        )
    else:
        with joined_world(recipe.timeout_seconds, recipe.device) as world:
            trial = Trial(recipe, batch, network, world)
            recipe = trial.recipe
            machine = trial.machine(ROUNDS, link, gpus_a_host)
            if world.rank:
                return None
        tried = (
            "measured"
            if world.size > 1
            else "not measured: start several ranks by torchrun to measure it"
        )
        basis = f"this machine, the medians of {ROUNDS} rounds; the link inside a host is {tried}"
    steps = [StepCost(recipe, batch, network, machine, count) for count in ranks]
    described = (
        f"{recipe.model.architecture} at {recipe.data.image_size} px in {recipe.precision}, B ="
        f" {batch:,}"
    )
    planned = f"{recipe.epochs:g} epochs" if notes else f"{length:,.0f} steps"
    return {
        "network": f"{described}, {planned}, engine {name_of('engine', recipe.engine)}",
        "assumptions": [basis, *_assumptions(steps[0]), *notes],
        "advice": _advice(steps),
        "engines": {step.ranks: engine_memory(step) for step in steps},
        "steps": [
            {
                **gpu_figures,
                "days": None if notes else length * gpu_figures["seconds_a_step"] / 86_400,
            }
            for gpu_figures in map(_figures, steps)
        ],
    }


def engine_memory(step: StepCost) -> dict[str, tuple[float, bool]]:
    """Return for each engine the bytes of a GPU, and whether they fit, on so many GPUs.

    The recipe's sizes are those of the recipe; no graph is kept.
    """
    answers = {}
    for name, engine in engines_of(step.recipe.precision == "bf16").items():
        recipe = step.recipe.model_copy(update={"engine": engine})
        recipe = changed(recipe, replay={"keep": 0})
        needed = sum(replace(step, recipe=recipe).memory.values())
        answers[name] = needed, needed <= step.machine.memory
    return answers


def first_that_fit(engines: dict[int, dict[str, tuple[float, bool]]]) -> str:
    """Return for each number of GPUs the first engine that fits, as a clause."""
    clauses = []
    for gpus, of_engines in engines.items():
        clauses.append(f"{_first_fitting(of_engines) or 'none'} on {gpus:,}")
    return ", ".join(clauses)


def _first_fitting(of_engines: dict[str, tuple[float, bool]]) -> str | None:
    return next((name for name, (_, fits) in of_engines.items() if fits), None)


def engine_table(engines: dict[int, dict[str, tuple[float, bool]]]) -> Table:
    """Return a row for each engine."""
    names = list(next(iter(engines.values())))
    rows = []
    for name in names:
        cells = [of_engines[name] for of_engines in engines.values()]
        sizes = [f"{needed / 1e9:.2f}{'' if fits else ' !'}" for needed, fits in cells]
        rows.append([name, *sizes])
    return text_table(
        "GB of a GPU by engine", ENGINES_CAPTION, ["engine", *map(str, engines)], rows
    )


def plan_tables(steps: list[dict[str, Any]]) -> list[Table]:
    rows = []
    for step in steps:
        hours = math.nan if step["days"] is None else 24 * step["days"]
        rows.append(
            SUMMARY.format(
                **step,
                gb=sum(step["memory"].values()) / 1e9,
                mark="" if step["fits"] else " !",
                hours=hours,
            )
            .replace("nan", "?")
            .split("|")
        )
    tables = [text_table("a step", CAPTION, HEADINGS, rows)]
    for title, name, unit, form in (
        ("seconds a step", "seconds", 1.0, "{:.3g}"),
        ("memory of a GPU, GB", "memory", 1e9, "{:.2f}"),
        ("sent by a GPU in a step, MB", "sent", 1e6, "{:,.1f}"),
    ):
        names = list(dict.fromkeys(part_name for step in steps for part_name in step[name]))
        values = {
            f"{step['gpus']:,}": [step[name].get(part_name, 0.0) / unit for part_name in names]
            for step in steps
        }
        rows = [
            [gpus, *map(form.format, [*amounts, sum(amounts)])] for gpus, amounts in values.items()
        ]
        tables.append(text_table(title, "", ["GPUs", *names, "all"], rows))
    return tables


def _assumptions(step: StepCost) -> list[str]:
    network = step.network
    machine = step.machine
    gflops = (network.convolutions.each + network.products.each) / 1e9
    rates = [link.bytes_per_second / 1e9 for link in (machine.inside, machine.between)]
    lines = [
        (
            f"a GPU can use {machine.memory / 1e9:,.1f} GB and sends {rates[0]:.3g} GB/s to others"
            f" of its host; hosts of {machine.gpus_a_host} GPUs send {rates[1]:.3g} GB/s; the"
            " slowest link sets the pace of a ring"
        ),
        (
            f"an image costs {gflops:,.2f} GFLOP forward, twice that backward, and"
            f" {network.graph.each / 1e6:,.1f} MB of activations; {network.parameters / 1e6:,.1f}"
            f" million parameters, {network.dimensions} dimensions"
        ),
        (
            f"B is the same on any number of GPUs, in micro-batches of {step.replay_size} images,"
            f" of which {step.kept} keep their graph; every image has a gradient"
        ),
        (
            "loaders keep up with images/s; no rank waits for a slower one; checkpoints and"
            " evaluations come on top"
        ),
    ]
    if bins_of(step.recipe.loss) is None:
        lines.append(
            "a loss by rows of similarities is taken to cost as much a pair as AP_Q, which is too"
            " little"
        )
    return lines


def _advice(steps: list[StepCost]) -> str:
    """Say what to set for as many GPUs as a host has, or the most below."""
    a_host = [step for step in steps if step.ranks <= step.machine.gpus_a_host]
    step = a_host[-1] if a_host else steps[0]
    figures = _figures(step)
    data = step.recipe.data
    gpus = f"{step.ranks} GPU{'s' * (step.ranks > 1)}"
    if not figures["fits"] and figures["greatest_replay_size"]:
        advice = (
            f"on {gpus} micro-batches of {step.replay_size} that keep {step.kept} graphs do not fit"
        )
        return (
            f"{advice}: set replay.size={figures['greatest_replay_size']} or less,"
            " and replay.keep=0"
        )
    if not figures["fits"]:
        fitting = _first_fitting(engine_memory(step))
        remedy = "choose a smaller data.image_size" if fitting is None else f"set engine: {fitting}"
        return f"on {gpus} this does not fit: {remedy}"
    local = min(step.ranks, step.machine.gpus_a_host)
    # As much again as pixels, for what workers have read ahead.
    memory = local * (RANK_BYTES + 2 * figures["host_memory"]) / 1e9
    decoded = DECODED_REDUCED if data.image_size <= REDUCED_SIDE else DECODED_WHOLE
    cores = math.ceil(figures["images_per_second"] * local / step.ranks / decoded)
    return (
        f"on {gpus} set replay.size={step.replay_size} replay.keep={figures['greatest_keep']}"
        f" data.workers={math.ceil(cores / local)}; a host needs {memory:,.0f} GB of memory, and"
        f" {cores} cores to decode photographs of a megapixel to {data.image_size} px"
    )


def _figures(step: StepCost) -> dict[str, Any]:
    total = sum(step.seconds.values())
    alone = sum(StepCost(step.recipe, step.batch, step.network, step.machine, 1).seconds.values())
    return {
        "gpus": step.ranks,
        "images_a_gpu": step.share,
        "seconds_a_step": total,
        "images_per_second": step.batch / total,
        "efficiency": alone / (step.ranks * total),
        "communication_share": (step.seconds["gather"] + step.seconds["reduce"]) / total,
        # pixels of a rank, which wait for replay
        "host_memory": 3 * step.share * step.recipe.data.image_size**2,
        "fits": sum(step.memory.values()) <= step.machine.memory,
        "seconds": step.seconds,
        "memory": step.memory,
        "sent": step.sent,
        "greatest_replay_size": step.greatest_replay_size,
        "greatest_keep": step.greatest_keep,
    }
