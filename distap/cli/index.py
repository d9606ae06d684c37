"""`distap index` builds an index, and updates it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distap.cli.options import BEST, CHECKPOINT, JSON, TRUST, WHITENING, print_json
from distap.errors import DistapError
from distap.telemetry.terminal import print_result, set_up_logging, track

if TYPE_CHECKING:
    from distap.retrieval.descriptor_files import DescriptorSet

INDEX_OR_DESCRIPTORS = "Folder that `distap extract` wrote; with --add, --remove or --to, an index."
DEFAULT_KIND = "flat"
KIND = (
    "Kind of index: flat (exact), hnsw (fastest at high recall), or Faiss's string, such as"
    " OPQ64,IVF4096,PQ64."
)
SEARCH = "Search parameters of Faiss to store in the index, such as nprobe=64 or efSearch=128."
ADD = "Images to add: a list of images (.csv), a folder, or shards."
REMOVE = "File with a key on each line: remove these images."
TO = (
    "Copy the index to a store: lancedb:PATH, qdrant:PATH or qdrant:http://HOST:6333, or write a"
    " script for PostgreSQL, pgvector:FILE.sql. Again, it copies what has changed."
)
REPLACE = "Let --add take over images that the index has with other bytes, class or columns."


def index_command(
    folder: Annotated[Path, typer.Argument(help=INDEX_OR_DESCRIPTORS, show_default=False)],
    output: Annotated[
        Path | None, typer.Argument(help="New folder to write an index to.", show_default=False)
    ] = None,
    kind: Annotated[str, typer.Option(help=KIND)] = DEFAULT_KIND,
    search: Annotated[str, typer.Option(help=SEARCH)] = "",
    add: Annotated[str | None, typer.Option(metavar="IMAGES", help=ADD)] = None,
    replace: Annotated[bool, typer.Option("--replace", help=REPLACE)] = False,
    remove: Annotated[Path | None, typer.Option(metavar="KEYS.txt", help=REMOVE)] = None,
    to: Annotated[str | None, typer.Option(metavar="URL", help=TO)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what an update would change, and stop.")
    ] = False,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    best: BEST = False,
    trust: TRUST = False,
    whitening: WHITENING = None,
    as_json: JSON = False,
) -> None:
    """Build a Faiss index over extracted descriptors, or update an index.

    `distap index DESCRIPTORS OUTPUT` measures recall@10 against exact search: an image counts as
    found if it is as near as the tenth exact result. The index belongs to the network that
    described its images. With --json: `output`, `images`, `dimensions`, `kind`, `recall`, `at` (its
    k), `bytes`, `milliseconds` per query, `queries`, `build_seconds`, `factory` and `search`.

    `distap index INDEX --add IMAGES --checkpoint RUN` describes only images that are new or
    changed, and writes a new generation of the index; `--remove KEYS.txt` removes images. Until the
    new one is complete, searches get the old one, which also stays after an error. With --json:
    numbers of images that are `new`, `replaced`, `relabelled` (other class or columns), `same`,
    `removed` and `left_out`, then `images` and `generation`.

    `distap index INDEX --to URL` makes a store hold the same as the index. With --json: numbers of
    images `written` and `deleted`, and `images`.
    """
    updates = {"--add": add, "--remove": remove, "--replace": replace, "--dry-run": dry_run}
    if to is not None:
        # A copy is a command of its own: whoever writes --dry-run next to it wants nothing written.
        others = {"an output folder": output, **updates, "--checkpoint": checkpoint}
        _refuse(others, "--to copies an index as it is: update it first, by a command of its own")
        _copy(folder, to, as_json)
        return
    if output is None:
        if add is None and remove is None:
            raise DistapError(
                "command.conflict",
                f"{folder}: give the folder to write an index to, or --add, --remove or --to to"
                " change or copy this index",
            )
        if (kind, search) != (DEFAULT_KIND, ""):
            raise DistapError(
                "command.conflict", "--kind and --search: an update keeps those of the index"
            )
        from distap.apps.updating import Network, update_index

        set_up_logging(0)
        network = None if checkpoint is None else Network(checkpoint, whitening, best, trust)
        result = update_index(folder, add, remove, network, replaces=replace, dry=dry_run)
        _print_update(folder, result, dry_run, as_json)
        return
    _refuse(
        {**updates, "--checkpoint": checkpoint},
        f"for an update of an index, which has no second folder: leave {output} out",
    )
    from distap.retrieval.descriptor_files import read_descriptors

    _build(read_descriptors(folder), output, kind, search, as_json)


def _refuse(options: dict[str, Any], reason: str) -> None:
    conflicts = [name for name, value in options.items() if value]
    if conflicts:
        raise DistapError("command.conflict", f"{', '.join(conflicts)}: {reason}")


def _copy(folder: Path, to: str, as_json: bool) -> None:
    from distap.apps.stores.copying import copy_index
    from distap.apps.stores.opening import open_store
    from distap.apps.stores.pgvector import write_pgvector
    from distap.retrieval.stored_index import read_index

    set_up_logging(0)
    index = read_index(folder)
    if to.startswith("pgvector:"):
        write_pgvector(Path(to.removeprefix("pgvector:")), index)
        counts = {"written": len(index), "deleted": 0, "images": len(index)}
    else:
        counts = copy_index(index, open_store(to))
    if as_json:
        print_json(counts)
        return
    print_result(
        f"{to}: {counts['written']:,} images written, {counts['deleted']:,} deleted; it holds"
        f" {counts['images']:,}"
    )


def _print_update(folder: Path, result: dict[str, Any], dry: bool, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    counts = "{new:,} new, {replaced:,} replaced, {relabelled:,} with another class or columns"
    counts += ", {same:,} the same, {removed:,} removed"
    if result["left_out"]:
        counts += "; {left_out:,} left out, for the reasons above"
    text = counts.format(**result)
    if dry:
        print_result(f"{folder}: would be: {text}; nothing was changed")
        return
    print_result(
        f"{folder}: {text}", f"generation {result['generation']}: {result['images']:,} images"
    )


def _build(gallery: "DescriptorSet", output: Path, kind: str, search: str, as_json: bool) -> None:
    from distap.retrieval.indexing import build_index, measure_recall
    from distap.retrieval.stored_index import require_free_for_index, stored_bytes, write_index

    require_free_for_index(output)
    built = build_index(gallery, kind, search, track)
    figures = measure_recall(built.index, gallery.descriptors)
    built.about["measured"] = figures
    written = write_index(output, built)
    count, dimensions = gallery.descriptors.shape
    summary = {
        "output": str(output),
        "images": count,
        "dimensions": dimensions,
        **built.about["index"],
        **figures,
        "bytes": stored_bytes(written),
        "build_seconds": built.about["build_seconds"],
    }
    if as_json:
        print_json(summary)
        return
    heading = "{output}: {images:,} images of {dimensions} dimensions, {kind}: {factory} {search}"
    measured = (
        "recall@{at} {recall:.4f} of {queries:,} of its images, {bytes:,} bytes, {milliseconds:.3f}"
        " ms a query, built in {build_seconds:.1f} s"
    )
    print_result(heading.format(**summary).rstrip(), measured.format(**summary))
