"""`distap search` and `distap serve`: find similar images."""

from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from distap.apps.serve.limits import ServeSettings
from distap.cli.options import BEST, CHECKPOINT, JSON, TRUST, WHITENING, print_json
from distap.errors import FAILED, DistapError
from distap.telemetry.terminal import print_result, print_warning, set_up_logging, text_table

if TYPE_CHECKING:
    from distap.apps.search import Query
    from distap.apps.stores.copying import StoreGallery

SEARCHED_INDEX = Annotated[
    Path, typer.Argument(help="Folder that `distap index` wrote.", show_default=False)
]
QUERIES = (
    "Image files, folders of images, or keys of the index (key:NAME if a file has the same name)."
)
PAGE = "HTML file to write the results to, with pictures."
INDEXED_IMAGES = Annotated[
    str | None,
    typer.Option(
        help="Data set that was indexed, to show pictures from.",
        show_default="where it was indexed",
    ),
]


STORE = (
    "Search in the store to which `distap index INDEX --to URL` copied an index. All arguments are"
    " then queries."
)
CONDITION = (
    "Search only images of which a column of their list fulfils this: category=shoes, price<=50,"
    " 'size in 38,39'. Repeat for several conditions, which must all hold."
)
WHERE = Annotated[list[str] | None, typer.Option(help=CONDITION, metavar="CONDITION")]
GROUPED = "Find the best image of each value of this column, such as product."
GROUP_BY = Annotated[str | None, typer.Option(help=GROUPED, metavar="COLUMN")]


def search_command(
    index: SEARCHED_INDEX,
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="QUERY...", help=QUERIES, show_default=False)
    ] = None,
    store: Annotated[
        str | None, typer.Option("--in", metavar="URL", help=STORE, show_default=False)
    ] = None,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    best: BEST = False,
    trust: TRUST = False,
    whitening: WHITENING = None,
    top: Annotated[
        int,
        typer.Option("--top", "--k", "-k", help="Number of images to find for each query.", min=1),
    ] = 10,
    where: WHERE = None,
    group: GROUP_BY = None,
    images: INDEXED_IMAGES = None,
    output: Annotated[Path | None, typer.Option(help=PAGE, show_default=False)] = None,
    as_json: JSON = False,
) -> None:
    """Find the most similar images in an index, for image files or for images of the index itself.

    An image that is searched for by its key needs no --checkpoint, and is not among its own hits.
    Files that cannot be used are named, and the exit status is then 1. With --json, a list:
    `query`, and `hits` of it, each with `rank` from 1, `key`, `class` and `similarity`, with
    `network` if several have described the index, and with `columns` of its list; or the `problem`
    of a file that cannot be used.
    """
    from distap.apps.search import open_searcher, open_thumbnails, queries_from, write_search_page
    from distap.world import joined_world

    with joined_world() as world:
        set_up_logging(world.rank)
        texts = list(queries or ())
        gallery: Any = index
        if store is not None:
            texts = [str(index), *texts]
            gallery = _store_to_search(store, output)
        if not texts:
            raise DistapError("command.conflict", f"{index}: give at least one query behind it")
        searcher = open_searcher(
            gallery, checkpoint, whitening, world=world, best=best, trust=trust
        )
        results = list(searcher.search(queries_from(texts, searcher.index), top, where, group))
    if output is not None:  # first, since printing may fail
        write_search_page(output, results, searcher.index, open_thumbnails(searcher.index, images))
    if as_json:
        print_json([_as_json(result) for result in results])
    for result in results:
        if result.problem:
            print_warning(f"{result.name}: {result.problem}")
        elif not as_json:
            print_result(_table(result))
    if output is not None and not as_json:
        print_result(f"page: {output}")
    if any(result.problem for result in results):
        raise typer.Exit(FAILED)


NEIGHBOURS_FILE = "File to write: .parquet or .csv; with --duplicates, .json."
DUPLICATES = "Write groups of images that are at least so similar, such as 0.98."
DUPLICATES_PAGE = "HTML file that shows the largest groups of --duplicates."
OF_EACH = "Search for each value of this column, such as product, in place of each image."


def _store_to_search(url: str, output: Path | None) -> "StoreGallery":
    if output is not None:
        raise DistapError(
            "command.conflict", f"--output {output}: a store has no pictures: search in an index"
        )
    from distap.apps.stores.opening import open_gallery, open_store

    return open_gallery(open_store(url), url)


def neighbours_command(
    index: SEARCHED_INDEX,
    output: Annotated[Path, typer.Option(help=NEIGHBOURS_FILE, show_default=False)],
    k: Annotated[
        int, typer.Option("--k", "-k", help="Number of neighbours of each image.", min=1)
    ] = 20,
    group: Annotated[str | None, typer.Option(help=OF_EACH, metavar="COLUMN")] = None,
    duplicates: Annotated[
        float | None,
        typer.Option(help=DUPLICATES, metavar="SIMILARITY", show_default=False, min=-1, max=1),
    ] = None,
    page: Annotated[Path | None, typer.Option(help=DUPLICATES_PAGE, show_default=False)] = None,
    images: INDEXED_IMAGES = None,
) -> None:
    """Find the nearest other images of every image of an index, or groups of near duplicates.

    The table has the columns `key`, `neighbour`, `rank` from 1 and `similarity`. The JSON of
    --duplicates has `groups`: lists of keys, the longest first.
    """
    expected = (".json",) if duplicates is not None else (".parquet", ".csv")
    if output.suffix not in expected or (page is not None and duplicates is None):
        raise DistapError(
            "command.conflict",
            f"--output {output}: expected a file {' or '.join(expected)} here; --page and .json are"
            " for --duplicates",
        )
    from distap.apps import neighbours
    from distap.retrieval.stored_index import read_index

    set_up_logging(0)
    opened = read_index(index)
    if duplicates is None:
        table = neighbours.neighbours_of_all(opened, k, group)
        neighbours.write_neighbours(output, table)
        print_result(f"{output}: {len(table.rank):,} neighbours of {len(set(table.names)):,}")
        return
    groups = neighbours.near_duplicates(opened, duplicates)
    neighbours.write_duplicates(output, opened, groups, duplicates)
    if page is not None:
        neighbours.write_duplicates_page(page, opened, groups, images)
    count = sum(map(len, groups))
    print_result(f"{output}: {len(groups):,} groups of {count:,} near duplicates")


def serve_command(
    index: SEARCHED_INDEX,
    checkpoint: Annotated[str, CHECKPOINT],
    best: BEST = False,
    trust: TRUST = False,
    whitening: WHITENING = None,
    images: INDEXED_IMAGES = None,
    **limits: Any,
) -> None:
    """Answer searches over HTTP: a page to upload images to, a JSON API, health and Prometheus
    metrics.

    On SIGTERM or SIGHUP the requests under way are finished and the exit status is 0. There is no
    encryption and no password: put a proxy in front of it if others can reach it.
    """
    from distap.apps.serve.server import serve

    serve(ServeSettings(**limits), index, checkpoint, whitening, images, best=best, trust=trust)


# Typer reads the options from the signature, in which those of ServeSettings replace `limits`.
_arguments = signature(serve_command).parameters.values()
_limits = signature(ServeSettings).parameters.values()
serve_command.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        *(argument for argument in _arguments if argument.kind is not argument.VAR_KEYWORD),
        *(limit.replace(kind=limit.KEYWORD_ONLY) for limit in _limits),
    ]
)


def _table(result: "Query") -> Table:
    headings = ["rank", "key", "class", "similarity"]
    rows = [
        [str(rank), escape(hit.key), escape(hit.class_name), f"{hit.similarity:.4f}"]
        for rank, hit in enumerate(result.hits, 1)
    ]
    names = dict.fromkeys(name for hit in result.hits for name in hit.columns)
    headings += map(escape, names)
    for row, hit in zip(rows, result.hits, strict=True):
        row += (escape(str(hit.columns.get(name, ""))) for name in names)
    if any(hit.network for hit in result.hits):
        headings.append("network")
        for row, hit in zip(rows, result.hits, strict=True):
            row.append(hit.network)
    return text_table(escape(result.name), "", headings, rows)


def _as_json(result: "Query") -> dict[str, Any]:
    hits: list[dict[str, Any]] = [
        {"rank": rank, "key": hit.key, "class": hit.class_name, "similarity": hit.similarity}
        | ({"network": hit.network} if hit.network else {})
        | ({"columns": dict(hit.columns)} if hit.columns else {})
        for rank, hit in enumerate(result.hits, 1)
    ]
    entry: dict[str, Any] = {"query": result.name, "hits": hits}
    if result.problem:
        entry["problem"] = result.problem
    return entry
