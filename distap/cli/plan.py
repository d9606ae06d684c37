"""`distap plan`: what a training will cost."""

from pathlib import Path
from typing import Annotated

import typer

from distap.train import CONFIG, OVERRIDES


def plan_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs to predict for.")] = "1,2,4,8,16,64,256,1024,4096",
    card: Annotated[
        str, typer.Option(help="The GPU: b200, h200, h100, a100, a100-40gb, l40s, l4, rtx4090.")
    ] = "h100",
    link: Annotated[str, typer.Option(help="Network of a host, a second: 400Gb in bits, 50GB in bytes.")] = "400Gb",
    gpus_a_host: Annotated[
        int | None, typer.Option(help="GPUs of a host.", min=1, show_default="as the card usually comes")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images of a global batch.", min=2, show_default="the recipe's")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure this machine, and predict for more of its kind, not for a card."),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Times that --measure does each thing; the median counts.", min=1)] = 5,
    json: Annotated[
        Path | None, typer.Option(help="File to write the figures to.", show_default="printed only")
    ] = None,
) -> None:
    """Predict seconds a step, memory, bytes on the wire and days of a recipe, from one GPU to thousands.

    Needs no GPU, no data and no weights. The assumptions are printed. With --measure a minute of the recipe's own
    network on this machine takes the place of the card's data sheet, and real steps are printed beside their
    prediction; started by torchrun (`torchrun --nproc-per-node 2 --no-python distap plan ...`) it measures the link
    between the ranks as well.
    """
    from distap.apps.plan.planning import from_card, from_measurement
    from distap.config.reading import load_recipe
    from distap.telemetry.terminal import console

    recipe = load_recipe(config, overrides or [])
    if measure:
        plan = from_measurement(recipe, gpus, batch, link, gpus_a_host, rounds)
    else:
        plan = from_card(recipe, gpus, batch, link, gpus_a_host, card)
    if plan is None:  # another rank prints
        return
    console.print(plan.network, markup=False)
    for table in plan.tables():
        console.print(table)
    for line in plan.assumptions:
        console.print(f"- {line}", markup=False, highlight=False)
    if json is not None:
        plan.write(json)
        console.print(f"{json}: written", markup=False)
