"""`distap whiten` and `distap index`, which read extracted descriptors."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.errors import DistapError

DESCRIPTORS = Annotated[Path, typer.Argument(help="Folder that `distap extract` wrote.", show_default=False)]
METHOD = "pca scales the principal components; lw (Radenović) shrinks directions in which matching images differ."
PAIRS = "With lw: JSON list of {query, positive}, names of matching images, from `distap data convert`."
KIND = "flat is exact, ivf-pq is smallest, hnsw is fastest at high recall; settings follow from the gallery's size."
FACTORY = "Instead of --kind, any string for faiss.index_factory, such as OPQ64,IVF4096,PQ64."
RECALL = "Folder of descriptors to measure recall with."
POWER = "With pca: power of the variance to divide by; 0.5 whitens fully."
WRITTEN = "File to write, such as RUN/whitening.safetensors."
COMPARE = "Also build and measure the other kinds, without writing them."
SEARCH = "Search parameters of Faiss to store in the index, such as nprobe=64 or efSearch=128."


def whiten_command(
    descriptors: DESCRIPTORS,
    kind: Annotated[Literal["pca", "lw"], typer.Option(help=METHOD)] = "pca",
    power: Annotated[float | None, typer.Option(help=POWER, show_default="0.25")] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Number of dimensions to keep.", min=1, show_default="all that vary")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help=PAIRS, show_default="each image with all others of its class")
    ] = None,
    output: Annotated[Path | None, typer.Option(help=WRITTEN, show_default="beside the descriptors")] = None,
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
    path = output or descriptors
    if path.is_dir():
        path /= WHITENING_FILE
    save_whitening(path, whitening)
    to, of = whitening.projection.shape
    console.print(
        f"{path}: {kind}, {of} to {to} dimensions, from {len(learned_from):,} descriptors; "
        f"apply it with distap extract --whitening {path}",
        markup=False,
    )


def index_command(
    descriptors: DESCRIPTORS,
    output: Annotated[Path, typer.Argument(help="Folder to write the index to.", show_default=False)],
    kind: Annotated[Literal["flat", "ivf-pq", "hnsw"] | None, typer.Option(help=KIND, show_default="flat")] = None,
    factory: Annotated[str | None, typer.Option(help=FACTORY)] = None,
    search: Annotated[str, typer.Option(help=SEARCH)] = "",
    queries: Annotated[
        Path | None, typer.Option(help=RECALL, show_default="1,000 of the indexed, each without itself")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help=COMPARE)] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Build on all GPUs; needs faiss-gpu.")] = False,
) -> None:
    """Build a Faiss index over extracted descriptors, and measure its recall against exact search.

    Recall@10 counts an image as found if it is as near as the tenth exact result. The index belongs to the network
    that described its images: descriptors of another network are refused.
    """
    from distap.retrieval.descriptor_files import read_descriptors
    from distap.retrieval.index_files import require_free_for_index, write_index
    from distap.retrieval.indexing import KINDS, build_index, measure_recall
    from distap.telemetry.terminal import console, text_table, track

    if kind is not None and factory is not None:
        raise DistapError("give one of --kind and --factory")
    chosen = factory or kind or "flat"
    require_free_for_index(output)
    gallery = read_descriptors(descriptors)
    asked = None
    if queries is not None:
        held_out = read_descriptors(queries)
        gallery.described_by.require_same(held_out.described_by, str(queries), gallery.data)
        asked = held_out.descriptors
    rows = []
    for name in [chosen, *(other for other in KINDS if compare and other != chosen)]:
        is_chosen = name == chosen
        on_gpu = gpu and (is_chosen or name != "hnsw")
        built = build_index(gallery.descriptors, name, search if is_chosen else "", track, on_gpu)
        figures = measure_recall(built.index, gallery.descriptors, asked)
        numbers = f"{figures.recall:.4f}", f"{figures.bytes:,}", f"{figures.milliseconds:.3f}", f"{built.seconds:.1f}"
        rows.append((name, *numbers, built.factory, built.search))
        if is_chosen:
            write_index(output, built, gallery, {"measured": {**asdict(figures), "held_out": asked is not None}})
    title = f"{len(gallery):,} descriptors of {gallery.descriptors.shape[1]} dimensions"
    queried = "held out" if asked is not None else "sampled, each without itself"
    caption = f"{figures.queries:,} queries, {queried}; their time is that of one after the other"
    measured = f"recall@{figures.at}", "bytes", "ms a query", "build s"
    headings = "index", *measured, "factory string", "search parameters"
    console.print(text_table(title, caption, headings, rows))
    console.print(f"{output}: {len(gallery):,} images, {chosen}", markup=False)
