"""Options shared by several commands: the recipe, the ranks, which network describes images, and how."""

import glob
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distap.errors import FAILED, FINISHED, DistapError
from distap.processes.exit_statuses import record_outcome
from distap.processes.stopping import go_deaf
from distap.telemetry.loggers.loggers import end_if_hanging

if TYPE_CHECKING:
    from distap.config.recipe import NetworkRecipe
    from distap.evaluation.describing import Describing
    from distap.model.network import RetrievalNetwork
    from distap.retrieval.whitening import Whitening
    from distap.world import World

AUTO = 0  # ranks: one for each GPU


def complete_recipe(incomplete: str) -> list[str]:
    """Names of distap's recipes, YAML files and folders that begin with what is typed."""
    names = [path.stem for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml")]
    found = [Path(file) for file in glob.glob(f"{glob.escape(incomplete)}*")]  # noqa: PTH207 - keeps what was typed
    files = [f"{path}/" if path.is_dir() else str(path) for path in found if path.is_dir() or path.suffix == ".yaml"]
    return sorted(name for name in names if name.startswith(incomplete)) + sorted(files)


def parse_ranks(text: str | int) -> int:
    """The number of --ranks; AUTO for `auto`."""
    if text in ("auto", AUTO):
        return AUTO
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r}: expected a number, 1 or more, or auto")
    return int(text)


def ranks_to_start(asked: int, device: str = "auto") -> int:
    """The number of ranks to start: as many as were asked for; with AUTO one for each GPU, or one without GPUs."""
    if asked != AUTO or device == "cpu" or sys.platform != "linux":
        return asked or 1
    import torch

    return max(1, torch.cuda.device_count())


EACH_GPU = "Number of processes to start on this machine; auto starts one for each GPU."
RANKS = Annotated[int, typer.Option(help=EACH_GPU, parser=parse_ranks, metavar="N|auto")]
RECIPE = "Recipe: a YAML file, or a name of `distap recipes`."
CONFIG = Annotated[Path, typer.Argument(help=RECIPE, show_default=False, autocompletion=complete_recipe)]
OVERRIDES = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the recipe, such as optimizer.learning_rate=1e-4.", show_default=False),
]

# Options of one panel of --help.
network = partial(typer.Option, rich_help_panel="Network")
image = partial(typer.Option, rich_help_panel="Image preparation")
refinement = partial(typer.Option, rich_help_panel="Refinement of descriptors")
output = partial(typer.Option, rich_help_panel="Output")

TRAINED = "run folder, one of its checkpoints, or a URL of either"
CHECKPOINT = network(help=f"Trained network: a {TRAINED}.", show_default=False)
BEST = Annotated[bool, network("--best", help="Use a run folder's best checkpoint, not its newest.")]
CROP = "Crop the central square and resize it to this side, in pixels; after --resize, crop only."
WHOLE = "Keep whole images, with the longer side reduced to this many pixels."
FACTORS = "Describe each image at these scale factors, such as 1,0.7071,0.5."
SCALES = Annotated[str | None, image(help=FACTORS, show_default="as in the recipe")]
SMOOTH = "Smooth images before shrinking them to a scale below 1; the code of earlier papers does not."
ANTIALIAS = Annotated[bool | None, image("--antialias/--no-antialias", help=SMOOTH, show_default="as in the recipe")]
WHITENING = Annotated[
    Path | None, refinement(help="Apply this whitening, a file or folder that `distap whiten` wrote.")
]


def run(command: typer.Typer, name: str) -> None:
    """Run a command line called `name`; a DistapError is printed without a traceback, since it is for a person."""
    status, problem = FAILED, None
    try:
        command(prog_name=name)
        status = FINISHED
    except DistapError as error:
        go_deaf()
        from distap.telemetry.terminal import print_error

        print_error(error)
        status, problem = error.status, error
        sys.exit(status)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else FINISHED if leaving.code is None else FAILED
        raise
    finally:
        record_outcome(status, problem)
        end_if_hanging(status)


@dataclass(frozen=True)
class Preparation:
    """How a command prepares images for a network, and how it whitens their descriptors."""

    image_size: Annotated[int | None, image(help=CROP, min=1, show_default="as in the recipe")] = None
    resize: Annotated[int | None, image(help="Scale the shorter side to this many pixels, then crop.", min=1)] = None
    max_side: Annotated[int | None, image(help=WHOLE, min=1)] = None
    original: Annotated[bool, image("--original", help="Keep whole images at their original size.")] = False
    scales: SCALES = None
    antialias: ANTIALIAS = None
    whitening: WHITENING = None

    def describing(
        self, recipe: "NetworkRecipe", network: "RetrievalNetwork", world: "World", **settings: Any
    ) -> "tuple[Describing, Whitening | None]":
        """Return how images are described, as these options say and else as the recipe says, and the whitening.

        `settings` are those of `describing_of`. Ranks do not wait for each other here.
        """
        from distap.config.images import SizedSection
        from distap.data.images.whole_images import Sizing
        from distap.retrieval.whitening import load_whitening
        from distap.training.build import describing_of

        if sum((bool(self.image_size or self.resize), self.max_side is not None, self.original)) > 1:
            raise DistapError("give one of --image-size (with or without --resize), --max-side and --original")
        own = SizedSection(resize=self.resize, crop=self.image_size, max_side=self.max_side, original=self.original)
        asked, evaluation = own != SizedSection(), recipe.evaluation
        sizing = (own if asked else evaluation).sizing(evaluation.crop or recipe.data.image_size)
        how: dict[str, Any] = {"scales": parse_scales(self.scales), "antialias": self.antialias}
        describing = describing_of(recipe, network, world, Sizing.parse(sizing), shown=True, **how, **settings)
        return describing, None if self.whitening is None else load_whitening(self.whitening)


def parse_scales(text: str | None) -> tuple[float, ...] | None:
    """The factors of --scales; None takes the recipe's."""
    try:
        return None if text is None else tuple(float(factor) for factor in text.split(","))
    except ValueError as error:
        raise DistapError(f"--scales {text!r}: expected numbers with commas, such as 1,0.7071,0.5") from error


def with_options(settings: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass, whose types carry their help, as options in place of its last."""

    def changed(command: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(command).parameters.values()
        fields = inspect.signature(settings).parameters.values()
        options = [field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in fields]
        # Typer reads the signature of a command.
        command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return command

    return changed
