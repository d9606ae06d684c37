"""`distap export`: write a network for programs without distap."""

from pathlib import Path
from typing import Annotated

import typer

from distap.cli.options import BEST, WHITENING
from distap.errors import DistapError

CHECKPOINT = "Trained network: a run folder, one of its checkpoints, or a URL of either."
OUTPUT = "Folder to write; it must be new or of an earlier export, which is replaced."
FORMAT = "Format to write: pt2 (torch.export), onnx, or safetensors (for distap.load and timm). Repeat for several."
SCALES = "Describe each image at these scale factors, such as 1,0.7071,0.5."
SIZE = "Height and width of the images that the program takes, pixels."


def export_command(
    checkpoint: Annotated[str, typer.Argument(help=CHECKPOINT, show_default=False)],
    output: Annotated[Path, typer.Argument(help=OUTPUT, show_default=False)],
    best: BEST = False,
    format: Annotated[list[str] | None, typer.Option(help=FORMAT, show_default="all installed")] = None,
    whitening: WHITENING = None,
    scales: Annotated[str | None, typer.Option(help=SCALES, show_default="as in the recipe")] = None,
    image_size: Annotated[int | None, typer.Option(help=SIZE, min=1, show_default="as in the recipe")] = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Let the program take images of any size.")
    ] = False,
    opset: Annotated[int, typer.Option(help="Version of ONNX operators to use.")] = 20,
) -> None:
    """Write a network for programs without distap: from uint8 pixels to descriptors, with a model card.

    The files include normalisation, pooling, whitening and L2. Each is compared with the checkpoint's network on the
    CPU, and nothing is written if one differs by more than 1e-4.
    """
    from distap.apps.export.to_folder import ExportSettings, export_to_folder, installed_formats
    from distap.telemetry.terminal import print_result, print_warning, set_up_logging, text_table

    set_up_logging(0)
    formats = format or installed_formats()
    settings = ExportSettings(formats, image_size, dynamic_size, _factors(scales), opset)
    exported = export_to_folder(checkpoint, output, settings, whitening, best)
    rows = [
        (
            name,
            f"{agreement.largest_difference:.1e}",
            f"{agreement.smallest_cosine:.7f}",
            ", ".join(map(str, agreement.batches)),
            ", ".join(f"{height} x {width}" for height, width in agreement.sizes),
        )
        for name, agreement in exported.programs.items()
    ]
    if rows:
        headings = ("", "largest difference", "smallest cosine", "batches", "sizes")
        print_result(text_table("", "", headings, rows))
    if not format and "onnx" not in formats:
        print_warning("model.onnx was left out; for it: pip install 'distap[onnx]'")
    sizing, dimensions = exported.describer.sizing, exported.describer.dimensions
    print_result(f"{output}: descriptors of {dimensions} dimensions, of images as `{sizing}`")


def _factors(text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(factor) for factor in text.split(","))
    except ValueError as error:
        raise DistapError(f"--scales {text!r}: expected numbers with commas, such as 1,0.7071,0.5") from error
