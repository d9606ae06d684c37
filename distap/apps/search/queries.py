"""What is searched for: files, folders of images, and keys of the index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distap.data.images.folders import list_folder
from distap.errors import DistapError
from distap.retrieval.index_files import Hit, SearchIndex

KEY = "key:"


@dataclass(frozen=True)
class Query:
    """An image file to be searched for, or a key of the index."""

    name: str  # as it is shown
    file: Path | None = None
    key: str | None = None


@dataclass(frozen=True)
class Found:
    """What a search found for a query, best first; or why there was none."""

    query: Query
    hits: list[Hit]
    problem: str = ""


def queries_from(texts: Sequence[str], index: SearchIndex) -> list[Query]:
    """What each of the texts means: `key:NAME`, an image file, a folder of images, or a key of the index.

    Raises:
        DistapError: it is none of these, or the folder has no image in it.
    """
    return [query for text in texts for query in _meant(text, index)]


def _meant(text: str, index: SearchIndex) -> Iterator[Query]:
    if text.startswith(KEY):
        key = text.removeprefix(KEY)
        index.row_of(key)
        yield Query(text, key=key)
        return
    path = Path(text)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # such as of a text that no path can be
        is_folder = is_file = False
    if is_folder:
        for name in list_folder(path).names:
            yield Query(str(path / name), path / name)
    elif is_file:
        yield Query(text, path)
    elif _is_key(text, index):
        yield Query(f"{KEY}{text}", key=text)
    else:
        raise DistapError(
            f"{text!r}: neither an image file, nor a folder of images, nor a key of the index of {index.data}"
        )


def _is_key(text: str, index: SearchIndex) -> bool:
    try:
        index.row_of(text)
    except DistapError:
        return False
    return True
