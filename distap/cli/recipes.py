"""`distap init`, `recipes` and `config`: write, list and print recipes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from distap.cli.commands import print_json
from distap.cli.options import OVERRIDES, RECIPE, complete_recipe
from distap.errors import DistapError

INPUT_SIZE = "Width and height of the network's input, pixels."
RECIPE_HEAD = ("paper", "data", "expected")  # of the comment that each of distap's recipes begins with
IMAGES = "Folder with a sub-folder for each class, shards, or a folder with `train` and `test` of either."
SCHEMA = "Print the JSON Schema of recipes, for completion and checks in an editor."
KEYS = "Print every key of a recipe with its values, its default and its meaning."


def init_command(
    images: Annotated[str, typer.Argument(help=IMAGES, show_default=False)],
    output: Annotated[Path, typer.Option(help="File to write the recipe to.")] = Path("recipe.yaml"),
    run: Annotated[
        str | None,
        typer.Option(help="Folder that the recipe's run writes into.", show_default="runs/, then the name"),
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Architecture of timm to train.", show_default="by the machine")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Weights to begin with: timm, random, or a mapping as in a recipe.")
    ] = "timm",
    image_size: Annotated[
        int | None, typer.Option(help=INPUT_SIZE, min=1, show_default="by images and machine")
    ] = None,
) -> None:
    """Look at your images and write a first recipe, with the reason for each choice.

    Train it with `distap train recipe.yaml`; change what you know better.
    """
    import yaml

    from distap.apps.advice import look, recipe_for
    from distap.config.reading import recipe_from
    from distap.storage.atomic import write_whole
    from distap.telemetry.terminal import print_result, print_warning

    if output.exists():
        raise DistapError(f"{output}: there is such a file already; give another --output")
    seen, classes = look(images)
    folder = run or str(Path("runs") / output.stem)
    text = recipe_for(seen, classes, folder, backbone, weights, image_size)
    try:
        recipe_from(yaml.safe_load(text), f"{output} (not written)")
    except yaml.YAMLError as error:
        raise DistapError(f"--weights {weights}: not valid YAML: {error}") from error
    write_whole(output, text)
    print_result(text.rstrip("\n"))
    if seen.alone:
        print_warning(f"{seen.alone:,} classes have one image, which is never learned from")
    print_result(f"{output}: written. Next: distap train {output} --dry-run, and without --dry-run")


def recipes_command(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to print.", show_default="list them all", autocompletion=complete_recipe),
    ] = None,
) -> None:
    """List the recipes of the papers, or print one.

    `distap train NAME key=value` trains one by its name; `distap recipes NAME > mine.yaml` makes it yours to change.
    """
    from rich.table import Table

    from distap.config.reading import RECIPES, named_recipe
    from distap.telemetry.terminal import print_result

    if name is not None:
        typer.echo(named_recipe(name).read_text("utf-8"), nl=False)
        return
    table = Table("name", *RECIPE_HEAD, box=None, pad_edge=False)
    for path in sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem):
        head = dict(re.findall(r"^# (\w+): (.*)$", path.read_text("utf-8"), re.MULTILINE))
        table.add_row(path.stem, *(head[key] for key in RECIPE_HEAD))
    print_result(table)


def config_command(
    config: Annotated[Path | None, typer.Argument(help=RECIPE, autocompletion=complete_recipe)] = None,
    overrides: OVERRIDES = None,
    schema: Annotated[bool, typer.Option("--schema", help=SCHEMA)] = False,
    keys: Annotated[bool, typer.Option("--keys", help=KEYS)] = False,
) -> None:
    """Print a recipe with all defaults, as a recipe; comments say where each value comes from.

    Origins are the recipe, the command line, or the default. --keys and --schema print what recipes may hold.
    """
    if schema + keys + (config is not None) != 1:
        raise DistapError("give one of RECIPE, --schema and --keys")
    if schema:
        from distap.config.keys import recipe_schema

        print_json(recipe_schema())
    elif keys:
        for line in _key_lines():
            typer.echo(line)
    elif config is not None:
        from distap.config.resolved import resolved_lines

        for line in resolved_lines(config, overrides or []):
            typer.echo(line)


def _key_lines() -> Iterator[str]:
    """Format each key with its possible values and default, and its meaning in the line below."""
    from distap.config.keys import recipe_keys

    for key in recipe_keys():
        default = f" (default {key.default})" if key.default else ""
        yield f"{key.path}{f' of {key.of}' if key.of else ''}: {key.values}{default}"
        if key.meaning:
            yield f"    {key.meaning}"
