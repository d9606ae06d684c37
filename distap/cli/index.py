"""`distap index` and `distap whiten`: what is made of extracted descriptors."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distap.errors import DistapError

if TYPE_CHECKING:
    from rich.table import Table

    from distap.retrieval.descriptor_files import DescriptorSet
    from distap.retrieval.index_kinds import BuiltIndex
    from distap.retrieval.index_recall import IndexFigures

DESCRIPTORS = Annotated[Path, typer.Argument(help="Folder that `distap extract` wrote.", show_default=False)]


def index_command(
    descriptors: DESCRIPTORS,
    output: Annotated[Path, typer.Argument(help="Folder to write the index to.", show_default=False)],
    kind: Annotated[
        Literal["flat", "ivf-pq", "hnsw"], typer.Option(help="Exact; smallest; or fastest at high recall.")
    ] = "flat",
    nlist: Annotated[
        int | None, typer.Option(help="ivf-pq: lists.", min=1, show_default="about 4 times the root of the images")
    ] = None,
    nprobe: Annotated[
        int | None, typer.Option(help="ivf-pq: lists that a search reads.", min=1, show_default="a sixteenth")
    ] = None,
    m: Annotated[
        int | None, typer.Option(help="ivf-pq: parts of a code.", min=1, show_default="half the dimensions, to 256")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="ivf-pq: bits of a part.", min=1, max=12, show_default="8")] = None,
    refine: Annotated[
        bool | None, typer.Option("--refine", help="ivf-pq: compare the best again in half precision.")
    ] = None,
    links: Annotated[int | None, typer.Option(help="hnsw: links of a descriptor.", min=2, show_default="32")] = None,
    ef: Annotated[int | None, typer.Option(help="hnsw: candidates of a search.", min=1, show_default="64")] = None,
    queries: Annotated[
        Path | None,
        typer.Option(
            help="Descriptors to measure recall with.", show_default="1,000 of the indexed, each without itself"
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Build and measure the other kinds too.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Build on the GPUs, with a Faiss that has them.")] = False,
) -> None:
    """Build a Faiss index over extracted descriptors, and measure its recall against exact search.

    Recall@10 counts an image as found where it is as near as the tenth of the exact result. The index belongs to the
    network that described its images; a search with another's descriptors is refused.
    """
    from distap.retrieval.descriptor_files import read_descriptors
    from distap.retrieval.index_files import require_no_descriptors, write_index
    from distap.retrieval.index_kinds import KINDS, build_index, index_kind
    from distap.retrieval.index_recall import measure
    from distap.telemetry.terminal import console, track

    chosen = index_kind(kind, nlist=nlist, nprobe=nprobe, m=m, bits=bits, refine=refine, links=links, ef=ef)
    require_no_descriptors(output)
    gallery = read_descriptors(descriptors)
    asked = None
    if queries is not None:
        held_out = read_descriptors(queries)
        gallery.require_same_maker(held_out.described_by, str(queries))
        asked = held_out.descriptors
    measured: list[tuple[BuiltIndex, IndexFigures]] = []
    for name in [kind, *(other for other in KINDS if compare and other != kind)]:
        settings = chosen if name == kind else index_kind(name)
        built = build_index(gallery.descriptors, settings, track, gpu and (name == kind or name != "hnsw"))
        figures = measure(built.index, gallery.descriptors, asked)
        measured.append((built, figures))
        if name == kind:
            write_index(output, built, gallery, {"measured": {**asdict(figures), "held_out": asked is not None}})
    console.print(_table(gallery, measured, held_out=asked is not None))
    console.print(f"{output}: {len(gallery):,} images, {kind}", markup=False)


def whiten_command(
    descriptors: DESCRIPTORS,
    kind: Annotated[
        Literal["pca", "lw"],
        typer.Option(help="Principal components; or what images of a class differ in, shrunk (Radenović's Lw)."),
    ] = "pca",
    power: Annotated[
        float | None, typer.Option(help="pca: of the variance; 0.5 is full whitening.", show_default="0.25")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Of the whitened descriptors.", min=1, show_default="all that vary")
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="lw: JSON list of {query, positive}, names of images that match, as `distap data convert` writes.",
            show_default="each image with all others of its class",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write, such as RUN/whitening.safetensors.", show_default="beside the descriptors"),
    ] = None,
) -> None:
    """Learn a whitening from the extracted descriptors of a training set.

    `distap extract --whitening FILE` applies it; it fits no other network, sizes and scales than it was learned from.
    """
    from distap.retrieval.descriptor_files import read_descriptors
    from distap.retrieval.matching_pairs import read_pairs
    from distap.retrieval.whitening import HALF_POWER, WHITENING_FILE, learn_discriminative, learn_pca, save_whitening
    from distap.telemetry.terminal import console

    if kind == "pca" and pairs is not None:
        raise DistapError("--pairs are for --kind lw: pca does not look at what matches")
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


def _table(gallery: "DescriptorSet", measured: "list[tuple[BuiltIndex, IndexFigures]]", held_out: bool) -> "Table":
    from distap.telemetry.terminal import text_table

    first = measured[0][1]
    asked = "held out" if held_out else "sampled, each without itself"
    rows = [
        (
            built.kind.name,
            f"{figures.recall:.4f}",
            f"{figures.bytes:,}",
            f"{figures.milliseconds:.3f}",
            f"{built.seconds:.1f}",
            ", ".join(f"{name} {value}" for name, value in asdict(built.kind).items()),
        )
        for built, figures in measured
    ]
    return text_table(
        f"{len(gallery):,} descriptors of {gallery.descriptors.shape[1]} dimensions",
        f"{first.queries:,} queries, {asked}; a query's time is that of one after the other",
        ("index", f"recall@{first.at}", "bytes", "ms a query", "build s", "settings"),
        rows,
    )
