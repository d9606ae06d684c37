"""`distap export`: write a network for programs without distap."""

from pathlib import Path
from typing import Annotated

import typer

from distap.cli.options import BEST, OVERRIDES, TRAINED, WHITENING
from distap.telemetry.terminal import print_result, print_warning, set_up_logging, text_table

EXPORT_FOLDER = "Folder to write; it must be new or of an earlier export, which is replaced."
PROGRAMS = "Format to write: pt2 (torch.export), onnx, or safetensors (for distap.load and timm). Repeat for several."


def export_command(
    checkpoint: Annotated[str, typer.Argument(help=TRAINED, show_default=False)],
    output: Annotated[Path, typer.Argument(help=EXPORT_FOLDER, show_default=False)],
    overrides: OVERRIDES = None,
    best: BEST = False,
    format: Annotated[list[str] | None, typer.Option(help=PROGRAMS, show_default="all installed")] = None,
    whitening: WHITENING = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Let exported programs take images of any size.")
    ] = False,
) -> None:
    """Write a network for programs without distap: from uint8 pixels to descriptors, with a model card.

    The files include normalisation, pooling, whitening and L2. Each program is compared with the checkpoint's network
    on the CPU, and nothing is written if one differs by more than 1e-4. KEY=VALUE changes the recipe of the network:
    evaluation.scales=[1,0.7] describes each image at two scales.
    """
    from distap.apps.export.to_folder import export_to_folder

    set_up_logging(0)
    exported = export_to_folder(
        checkpoint, output, format or (), whitening, best, dynamic_size=dynamic_size, overrides=overrides or []
    )
    rows = [
        (name, f"{agreement.largest_difference:.1e}", f"{agreement.smallest_cosine:.7f}")
        for name, agreement in exported.programs.items()
    ]
    if rows:
        print_result(text_table("", "", ("", "largest difference", "smallest cosine"), rows))
    if not format and "model.onnx" not in exported.programs:
        print_warning("model.onnx was left out; for it: pip install 'distap[onnx]'")
    sizing, dimensions = exported.describer.sizing, exported.describer.dimensions
    print_result(f"{output}: descriptors of {dimensions} dimensions, of images as `{sizing}`")
