"""`distap export`: write a network for programs without distap."""

from pathlib import Path
from typing import Annotated

import typer

from distap.cli.options import BEST, OVERRIDES, TRUST, WHITENING
from distap.telemetry.terminal import print_result, print_warning, set_up_logging

TRAINED_RUN = "Trained network: a run folder, one of its checkpoints, or a URL of either."
EXPORT_FOLDER = "Folder to write; it must be new or empty."
FORMAT_HELP = (
    "Format: pt2 (torch.export), onnx, safetensors (distap.load, timm) or adapter. Repeat for"
    " several."
)


def export_command(
    checkpoint: Annotated[str, typer.Argument(help=TRAINED_RUN, show_default=False)],
    output: Annotated[Path, typer.Argument(help=EXPORT_FOLDER, show_default=False)],
    overrides: OVERRIDES = None,
    best: BEST = False,
    trust: TRUST = False,
    format: Annotated[
        list[str] | None, typer.Option(help=FORMAT_HELP, show_default="pt2, onnx, safetensors")
    ] = None,
    whitening: WHITENING = None,
) -> None:
    """Write a network for programs without distap, and a model card.

    It maps uint8 pixels to descriptors. The files include normalisation, pooling, whitening and L2.
    Each program is compared with the checkpoint's network on the CPU, and nothing is written if one
    differs by more than 1e-4. KEY=VALUE changes the recipe of the network:
    evaluation.scales=[1,0.7] describes each image at two scales. `--format adapter` writes what
    training changed, and the name of the base, for distap.load and peft.
    """
    from distap.apps.export.exporting import export_to_folder

    set_up_logging(0)
    describer, programs = export_to_folder(
        checkpoint, output, format or (), whitening, best, overrides or [], trust
    )
    for name, difference in programs.items():
        print_result(f"{name}: differs from the network by {difference:.1e} at most")
    if not format and "model.onnx" not in programs:
        print_warning("model.onnx was left out; for it: pip install 'distap[onnx]'")
    print_result(
        f"{output}: descriptors of {describer.dimensions} dimensions, of images as"
        f" `{describer.sizing}`"
    )
