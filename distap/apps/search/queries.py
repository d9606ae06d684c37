"""Queries of a search: image files, folders of images, and keys of the index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distap.data.images.image_sets import list_folder
from distap.errors import DistapError
from distap.retrieval.index_files import Hit, SearchIndex

KEY = "key:"


@dataclass(frozen=True)
class Query:
    """An image file to search for; or, if `file` is None, an image of the index by its key."""

    name: str  # as it is shown
    file: Path | None = None
    key: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The hits of a query, best first; or the problem with its file."""

    query: Query
    hits: list[Hit]
    problem: str = ""


def queries_from(texts: Sequence[str], index: SearchIndex) -> list[Query]:
    """The queries that texts stand for: `key:NAME`, an image file, a folder of images, or a key of the index.

    Raises:
        DistapError: a text is none of these, or the folder has no image in it.
    """
    return [query for text in texts for query in _queries(text, index)]


def _queries(text: str, index: SearchIndex) -> Iterator[Query]:
    if text.startswith(KEY):
        key = text.removeprefix(KEY)
        index.row_of(key)
        yield Query(text, key=key)
        return
    path = Path(text)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # such as a text that is too long for a path
        is_folder = is_file = False
    if is_folder:
        for name in list_folder(path).names:
            yield Query(str(path / name), path / name)
    elif is_file:
        yield Query(text, path)
    else:
        try:
            index.row_of(text)
        except DistapError as error:
            raise DistapError(
                f"{text!r}: neither an image file, nor a folder of images, nor a key of the index of {index.data}"
            ) from error
        yield Query(f"{KEY}{text}", key=text)
