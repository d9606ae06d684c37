"""`distap whiten`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.errors import DistapError

KIND = "pca scales the principal components; lw (Radenović) shrinks directions in which matching images differ."
PAIRS = "With lw: JSON list of {query, positive}, names of matching images, from `distap data convert`."


def whiten_command(
    descriptors: Annotated[Path, typer.Argument(help="Folder that `distap extract` wrote.", show_default=False)],
    kind: Annotated[Literal["pca", "lw"], typer.Option(help=KIND)] = "pca",
    power: Annotated[
        float | None,
        typer.Option(help="With pca: power of the variance to divide by; 0.5 whitens fully.", show_default="0.25"),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Number of dimensions to keep.", min=1, show_default="all that vary")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help=PAIRS, show_default="each image with all others of its class")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write, such as RUN/whitening.safetensors.", show_default="beside the descriptors"),
    ] = None,
) -> None:
    """Learn a whitening from the extracted descriptors of a training set.

    `distap extract --whitening FILE` applies it. It fits only the network, image size and scales it was learned from.
    """
    from distap.retrieval.descriptor_files import read_descriptors
    from distap.retrieval.whitening import (
        HALF_POWER,
        WHITENING_FILE,
        learn_discriminative,
        learn_pca,
        read_pairs,
        save_whitening,
    )
    from distap.telemetry.terminal import console

    if kind == "pca" and pairs is not None:
        raise DistapError("--pairs are for --kind lw: pca ignores which images match")
    if kind == "lw" and power is not None:
        raise DistapError("--power is for --kind pca: lw has none")
    learned_from = read_descriptors(descriptors)
    if kind == "pca":
        whitening = learn_pca(learned_from, HALF_POWER if power is None else power, dimensions)
    else:
        matching = None if pairs is None else read_pairs(pairs, learned_from)
        whitening = learn_discriminative(learned_from, dimensions, matching)
    path = output or descriptors / WHITENING_FILE
    if path.is_dir():
        path /= WHITENING_FILE
    save_whitening(path, whitening)
    to, of = whitening.projection.shape
    console.print(
        f"{path}: {kind}, {of} to {to} dimensions, from {len(learned_from):,} descriptors; "
        f"apply it with distap extract --whitening {path}",
        markup=False,
    )
