"""`distap init`, `recipes` and `config`: write, list and print recipes."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from distap.cli.options import OVERRIDES, RECIPE_ARGUMENT
from distap.errors import DistapError
from distap.telemetry.terminal import print_result, print_text, print_warning

ARCHITECTURE = "Architecture of timm to train."
WEIGHTS_HELP = "Weights to begin with: timm, random, or a mapping as in a recipe."
INPUT_SIZE = "Width and height of the network's input, pixels."
# Keys of the comment at the head of each of distap's recipes.
RECIPE_HEAD = ("paper", "data", "expected")
IMAGES_HELP = (
    "Folder with a sub-folder per class, shards, or a folder whose `train` and `test` are one of"
    " these. Give several to train on all of them."
)


def init_command(
    images: Annotated[list[str], typer.Argument(help=IMAGES_HELP, show_default=False)],
    output: Annotated[Path, typer.Option(help="File to write the recipe to.")] = Path(
        "recipe.yaml"
    ),
    backbone: Annotated[
        str | None, typer.Option(help=ARCHITECTURE, show_default="by the machine")
    ] = None,
    weights: Annotated[str, typer.Option(help=WEIGHTS_HELP)] = "timm",
    image_size: Annotated[
        int | None, typer.Option(help=INPUT_SIZE, min=1, show_default="by images and machine")
    ] = None,
) -> None:
    """Look at your images and write a first recipe, with the reason for each choice.

    Train it with `distap train recipe.yaml`; change what you know better. The recipe for several
    data sets trains on all of them, and evaluates each and all together.
    """
    if output.exists():
        raise DistapError(
            "storage.exists", f"{output}: there is such a file already; give another --output"
        )
    from distap.apps.advice import recipe_for
    from distap.apps.looking import look_at_each
    from distap.config.reading import load_recipe, parsed_yaml
    from distap.storage.atomic import write_whole

    looks = look_at_each(images)
    text = recipe_for(looks, str(Path("runs") / output.stem), backbone, weights, image_size)
    # Other values are right, and checking them would load torch.
    if weights not in ("timm", "random") or ":" in (backbone or ""):
        load_recipe(parsed_yaml(text, f"--weights {weights}"), where=f"{output} (not written)")
    write_whole(output, text)
    print_result(text.rstrip("\n"))
    alone = sum(look.alone for look in looks.values())
    if alone:
        print_warning(f"{alone:,} classes have one image, which is never learned from")
    print_result(f"{output}: written. Next: distap train {output} --dry-run, and without --dry-run")


def recipes_command(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the recipe to print.", show_default="list them all"),
    ] = None,
) -> None:
    """List the recipes that come with distap, or print one.

    `distap train NAME key=value` trains one by its name; `distap recipes NAME > mine.yaml` makes it
    yours to change.
    """
    from distap.config.reading import RECIPES, recipe_file

    if name is not None:
        print_text(recipe_file(Path(name)).read_text("utf-8").rstrip("\n"))
        return
    table = Table("name", *RECIPE_HEAD, box=None, pad_edge=False)
    for path in sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem):
        head = dict(re.findall(r"^# (\w+): (.*)$", path.read_text("utf-8"), re.MULTILINE))
        table.add_row(path.stem, *(head[key] for key in RECIPE_HEAD))
    print_result(table)


def config_command(config: RECIPE_ARGUMENT, overrides: OVERRIDES = None) -> None:
    """Print a recipe with all its keys and defaults, as YAML that is again a recipe."""
    import yaml

    from distap.config.reading import load_recipe

    settings = load_recipe(config, overrides or []).model_dump(mode="json")
    print_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip("\n"))
