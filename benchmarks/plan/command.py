"""`python -m benchmarks plan`: predict what a recipe's steps cost."""

import re
from typing import Annotated

import typer

from benchmarks.plan.planning import cost_plan, engine_table, first_that_fit, plan_tables
from benchmarks.plan.store_cost import Prices, store_costs, store_table
from distap.cli.options import OVERRIDES, RECIPE_ARGUMENT
from distap.config.reading import load_recipe
from distap.errors import DistapError
from distap.telemetry.terminal import print_result

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
CARD = "GPU to predict for: b200, h200, h100, a100, a100-40gb, l40s, l4 or rtx4090."
LINK = "Network rate of a host per second: 400Gb is in bits, 50GB in bytes."
STORE = "Predict also what the images of an epoch cost their store. Reads the index of data.train."
GIGABYTE = "Price of a gigabyte that leaves the store, for --store."
REQUESTS = "Price of a thousand requests, for --store."
MEASURE = "Measure this machine and predict for more machines like it."


def plan_command(
    config: RECIPE_ARGUMENT,
    overrides: OVERRIDES = None,
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs to predict for.")
    ] = "1,2,4,8,16,64,256,1024,4096",
    card: Annotated[str, typer.Option(help=CARD)] = "h100",
    link: Annotated[str, typer.Option(help=LINK)] = "400Gb",
    gpus_a_host: Annotated[int, typer.Option(help="GPUs in a host.", min=1)] = 8,
    batch: Annotated[
        int | None,
        typer.Option(help="Images of a global batch.", min=2, show_default="the recipe's"),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help=MEASURE)] = False,
    store: Annotated[bool, typer.Option("--store", help=STORE)] = False,
    gb_price: Annotated[float, typer.Option(help=GIGABYTE, min=0)] = 0.0,
    request_price: Annotated[float, typer.Option(help=REQUESTS, min=0)] = 0.0,
) -> None:
    """Predict seconds per step, memory, bytes on the wire and hours of a recipe, from one GPU to
    thousands.

    A prediction needs no GPU, no data and no weights, and prints its assumptions. With --measure, a
    minute of steps of the recipe's network on this machine replaces the data sheet of the card.
    Started by torchrun (`torchrun --nproc-per-node 2 -m benchmarks plan ...`), --measure times the
    link between the ranks as well. With --store, the requests and bytes of an epoch are those of
    the training's own batches, for the store's bill.
    """
    recipe = load_recipe(config, overrides or [])
    size = batch or recipe.sampling.size
    plan = cost_plan(
        recipe,
        size,
        parse_gpus(gpus, size),
        parse_rate(link),
        gpus_a_host,
        None if measure else card,
    )
    if plan is not None:  # rank 0 prints
        assumptions = [f"- {line}" for line in plan["assumptions"]]
        print_result(
            plan["network"],
            *plan_tables(plan["steps"]),
            engine_table(plan["engines"]),
            *assumptions,
            f"- the first engine that fits: {first_that_fit(plan['engines'])}",
            f"advice: {plan['advice']}",
        )
        if store:
            prices = Prices(gb_price, request_price)
            ranks = parse_gpus(gpus, size)
            print_result(store_table(store_costs(recipe, ranks, gpus_a_host, prices)))


def parse_gpus(text: str, batch: int) -> list[int]:
    """Return the numbers of GPUs in a text such as `1,8,64` for which a batch has images."""
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise DistapError(
            "command.wrong_option",
            f"--gpus {text!r}: expected numbers with commas between them, such as 1,8,64",
        )
    possible = [
        number for number in sorted({int(number) for number in text.split(",")}) if number <= batch
    ]
    if not possible:
        raise DistapError(
            "command.wrong_option",
            f"--gpus {text!r}: a batch of {batch} images has fewer images than GPUs; give fewer"
            " GPUs",
        )
    return possible


def parse_rate(text: str) -> float:
    """Return a rate in bytes per second.

    `400Gb` is in bits per second, `50GB` in bytes per second.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(b|bit|B)(?:/s|ps)?", text.strip())
    if match is None or float(match[1]) == 0:
        raise DistapError(
            "command.wrong_option",
            f"{text!r} is no rate: expected 400Gb for bits per second or 50GB for bytes per second",
        )
    return float(match[1]) * UNITS[match[2]] / (1 if match[3] == "B" else 8)
