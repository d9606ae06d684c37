"""Search an index by images or keys, for `distap search` and `distap serve`."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.images.whole_images import Thumbnails, thumbnail, thumbnails_of
from distap.data.loading.reader import ImageSet, open_images
from distap.data.shards.index import index_of_folder
from distap.errors import DistapError, logger
from distap.pages.page import THUMBNAIL, write_page
from distap.retrieval.descriptor_files import DescribedBy
from distap.retrieval.filters import Where
from distap.retrieval.searching import Hit, SearchIndex
from distap.retrieval.stored_index import read_index
from distap.storage.locations import parse_source
from distap.storage.names import composed

if TYPE_CHECKING:
    from torch import Tensor

    from distap.apps.stores.copying import StoreGallery
    from distap.evaluation.extraction.image_describer import ImageDescriber
    from distap.world import World

KEY_PREFIX = "key:"


@dataclass(frozen=True)
class Query:
    """An image file to search for, or the key of an image in the index, and the hits."""

    name: str  # as it is shown
    file: Path | None = None  # None searches for the key
    key: str = ""
    hits: Sequence[Hit] = ()  # best first
    problem: str = ""  # why the file cannot be used


@dataclass(frozen=True, eq=False)
class Searcher:
    """Find similar images in a gallery; several threads may call it at once."""

    index: SearchIndex
    # Describes the images to search for; None allows searches by key alone.
    describer: "ImageDescriber | None" = None
    # Decodes in another process, as the describer would.
    pixels_of: "Callable[[bytes], Tensor] | None" = None

    def by_image(
        self, image: bytes, k: int, where: Where = None, group: str | None = None
    ) -> list[Hit]:
        """Return at most k images of the gallery, those most similar to an image file first.

        `SearchIndex.search` explains `where` and `group`.

        Raises:
            DamagedImageError: the image cannot be decoded or is too large.
        """
        if self.describer is None:
            raise DistapError(
                "search.needs_network",
                "images are described by the network of the index: name its run with --checkpoint",
            )
        if self.pixels_of:
            pixels = self.pixels_of(image)
        else:
            pixels = self.describer.sizing(EncodedImage(image))
        descriptors = self.describer.describe_pixels([pixels], 1).numpy()
        return self.index.search(descriptors, k, where=where, group=group)[0]

    def by_key(self, key: str, k: int, where: Where = None, group: str | None = None) -> list[Hit]:
        """Return the k images most similar to the gallery's image of this key, without itself."""
        descriptor = self.index.descriptor_of(key)
        # k + 1, because the image itself is among them, though not always first.
        hits = self.index.search(descriptor, k + 1, where=where, group=group)[0]
        return [hit for hit in hits if composed(hit.key) != composed(key)][:k]

    def search(
        self, queries: Sequence[Query], k: int, where: Where = None, group: str | None = None
    ) -> Iterator[Query]:
        """Yield each query with its hits, or with the problem of an unusable file."""
        for query in queries:
            try:
                if query.file is None:
                    hits = self.by_key(query.key, k, where, group)
                else:
                    hits = self.by_image(query.file.read_bytes(), k, where, group)
                yield replace(query, hits=hits)
            except DamagedImageError as error:
                yield replace(query, problem=str(error))
            except OSError as error:
                yield replace(query, problem=f"cannot be read: {error.strerror or error}")


def open_searcher(
    index: "Path | SearchIndex | StoreGallery",
    checkpoint: Path | str | None = None,
    whitening: Path | None = None,
    *,
    world: "World",
    best: bool = False,
    trust: bool = False,
) -> Searcher:
    """Open an index, or take an opened one, with what described its images.

    If several networks did, any of them describes the queries.

    Args:
        checkpoint: a run folder or one of its checkpoints, or the URL of either; None allows
            searches by key alone.
        best: take a run folder's best checkpoint instead of its newest.
        trust: let the network's record name classes that are not distap's.
    """
    opened = read_index(index) if isinstance(index, Path) else index
    if checkpoint is None:
        return Searcher(cast(SearchIndex, opened))
    where = index if isinstance(index, Path) else opened.data
    describer = describer_of(
        opened.makers, checkpoint, whitening, world=world, best=best, trust=trust, where=where
    )
    # A store answers as an index does, but for rows and groups.
    return Searcher(cast(SearchIndex, opened), describer)


def describer_of(
    makers: Sequence[DescribedBy],
    checkpoint: Path | str,
    whitening: Path | None,
    *,
    world: "World",
    best: bool,
    trust: bool,
    where: Path | str,
) -> "ImageDescriber":
    """Return what describes images as one of the makers did; see `open_searcher`.

    Args:
        where: the index, for messages.
    """
    if whitening is None and all(maker.whitening is not None for maker in makers):
        raise DistapError(
            "descriptors.whitening_missing",
            f"{where}: its images were described with a whitening: name its file with --whitening",
        )
    # Imported here, since keys need no network.
    from distap.evaluation.extraction.image_describer import describer_like, maker_of
    from distap.retrieval.whitening import load_whitening
    from distap.training.build import trained_network

    _, network = trained_network(checkpoint, world, best, trusted=trust)
    learned = None if whitening is None else load_whitening(whitening)
    return describer_like(maker_of(makers, network, learned), network, learned)


@dataclass(frozen=True, eq=False)
class Pictures:
    """Thumbnails of the images of an index, by row; None for one that has none."""

    rows: Container[int]  # that have an image
    thumbnails: Thumbnails

    def __call__(self, row: int) -> bytes | None:
        return self.thumbnails(row)


def open_thumbnails(index: SearchIndex, source: str | None = None) -> Pictures:
    """Return a maker of thumbnails by row of the index; warn if images are missing.

    Args:
        source: the data set; None for the places from which its images were described.
    """
    places: dict[int, tuple[ImageSet, int]] = {}
    # The latest place that has an image is the one that it was described from.
    sources = index.images.sources if source is None else (source,)
    opened = list[str]()
    for where in sources:
        try:
            images = open_images(where)
        except DistapError as error:
            logger.warning(
                "hits are shown without pictures: %s; name the data set with --images", error
            )
            continue
        opened.append(where)
        rows = index.rows_of(images.keys.tolist()).tolist()
        places |= {row: (images, sample) for sample, row in enumerate(rows) if row >= 0}
    missing = len(index) - len(places)
    if missing and opened:
        logger.warning(
            "%s has no image for %d of the %d keys of the index, shown without pictures: was it the"
            " indexed data set?",
            ", ".join(opened),
            missing,
            len(index),
        )

    def encoded(row: int) -> EncodedImage | None:
        if row not in places:
            return None
        images, sample = places[row]
        return images.encoded(sample)

    return Pictures(places, thumbnails_of(encoded, THUMBNAIL))


def queries_from(texts: Sequence[str], index: SearchIndex) -> list[Query]:
    """Parse `key:NAME`, image files, folders of images, or keys of the index into queries."""
    queries = list[Query]()
    for text in texts:
        path = Path(text)
        is_folder = False
        is_file = False
        with suppress(OSError, ValueError):  # a text may be too long for a path
            is_folder = path.is_dir()
            is_file = path.is_file()
        if text.startswith(KEY_PREFIX):
            key = text.removeprefix(KEY_PREFIX)
            index.descriptor_of(key)
            queries.append(Query(text, key=key))
        elif is_folder:
            names = index_of_folder(parse_source(path), labelled=False).key.tolist()
            queries += [Query(str(path / name), path / name) for name in names]
        elif is_file:
            queries.append(Query(text, path))
        elif index.has(text):
            queries.append(Query(f"{KEY_PREFIX}{text}", key=text))
        else:
            raise DistapError(
                "search.unknown_query",
                f"{text!r}: no image file, no folder of images, and no key of the index of"
                f" {index.data}",
            )
    return queries


def write_search_page(
    path: Path,
    results: Sequence[Query],
    index: SearchIndex,
    thumbnails: Thumbnails,
    title: str = "Search results",
) -> None:
    """Write the results, in their order, as one HTML file; its folder is created."""

    def query_picture(query: Query) -> bytes | None:
        if query.file is None:
            return thumbnails(index.row_of(query.key))
        try:
            return thumbnail(EncodedImage(query.file.read_bytes()), THUMBNAIL)
        except (OSError, DamagedImageError):
            return None

    write_page(
        path,
        "search.html",
        title=title,
        index=index,
        results=[
            (query, query_picture(query), [(hit, thumbnails(hit.row)) for hit in query.hits])
            for query in results
        ],
    )
