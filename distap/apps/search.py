"""Search an index by images or keys, for `distap search` and `distap serve`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.images.whole_images import Thumbnails, thumbnail, thumbnails_of
from distap.data.loading.reader import open_images
from distap.data.shards.index import index_of_folder
from distap.errors import DistapError, logger
from distap.pages.page import THUMBNAIL, write_page
from distap.retrieval.indexing import Hit, SearchIndex, read_index
from distap.storage.locations import parse_source
from distap.storage.names import Names

if TYPE_CHECKING:
    from torch import Tensor

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

    def by_image(self, image: bytes, k: int) -> list[Hit]:
        """Return at most k images of the gallery, those most similar to an image file first.

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
        return self.index.search(self.describer.describe_pixels([pixels], 1).numpy(), k)[0]

    def by_key(self, key: str, k: int) -> list[Hit]:
        """Return the k images most similar to the gallery's image of this key, without itself."""
        row = self.index.row_of(key)
        try:
            descriptor = self.index.descriptor(row)
        except RuntimeError as error:
            kind = self.index.about["index"]["kind"]
            raise DistapError(
                "search.no_descriptor",
                f"an index of kind {kind} has no descriptor of {key!r}: search by the image",
            ) from error
        # An index that keeps codes gives an approximation, whose length is not 1.
        descriptor = descriptor / max(float(np.linalg.norm(descriptor)), np.finfo(np.float32).tiny)
        # k + 1, because the image itself is among them, though not always first.
        hits = self.index.search(descriptor[None].astype(np.float32), k + 1)[0]
        return [hit for hit in hits if hit.row != row][:k]

    def search(self, queries: Sequence[Query], k: int) -> Iterator[Query]:
        """Yield each query with its hits, or with the problem of an unusable file."""
        for query in queries:
            try:
                if query.file is None:
                    hits = self.by_key(query.key, k)
                else:
                    hits = self.by_image(query.file.read_bytes(), k)
                yield replace(query, hits=hits)
            except DamagedImageError as error:
                yield replace(query, problem=str(error))
            except OSError as error:
                yield replace(query, problem=f"cannot be read: {error.strerror or error}")


def open_searcher(
    index: Path,
    checkpoint: Path | str | None = None,
    whitening: Path | None = None,
    *,
    world: "World",
    best: bool = False,
    trust: bool = False,
) -> Searcher:
    """Open an index with the network and the whitening that described its images.

    If several networks did, any of them describes the queries.

    Args:
        checkpoint: a run folder or one of its checkpoints, or the URL of either; None allows
            searches by key alone.
        best: take a run folder's best checkpoint instead of its newest.
        trust: let the network's record name classes that are not distap's.
    """
    opened = read_index(index)
    networks = opened.networks
    makers = (opened.described_by,) if networks is None else networks.described_by
    if checkpoint is None:
        return Searcher(opened)
    if whitening is None and all(maker.whitening is not None for maker in makers):
        raise DistapError(
            "descriptors.whitening_missing",
            f"{index}: its images were described with a whitening: name its file with --whitening",
        )
    # Imported here, since keys need no network.
    from distap.evaluation.extraction.image_describer import describer_like, maker_of
    from distap.retrieval.whitening import load_whitening
    from distap.training.build import trained_network

    _, network = trained_network(checkpoint, world, best, trusted=trust)
    learned = None if whitening is None else load_whitening(whitening)
    return Searcher(opened, describer_like(maker_of(makers, network, learned), network, learned))


def open_thumbnails(index: SearchIndex, source: str | None = None) -> Thumbnails:
    """Return a maker of thumbnails by row of the index; warn if images are missing.

    Args:
        source: the data set; None for the place from which its images were described.
    """
    where = source or index.data
    try:
        images = open_images(where)
    except DistapError as error:
        logger.warning(
            "hits are shown without pictures: %s; name the data set with --images", error
        )
        return lambda row: None
    numbers = {key: sample for sample, key in enumerate(images.keys.tolist())}
    names = Names(numbers)
    keys = {row: names.known_as(key) for key, row in index.rows.items()}
    sample_of = {row: numbers[key] for row, key in keys.items() if key in numbers}
    missing = len(index) - len(sample_of)
    if missing:
        logger.warning(
            "%s has no image for %d of the %d keys of the index, shown without pictures: was it the"
            " indexed data set?",
            where,
            missing,
            len(index),
        )
    return thumbnails_of(
        lambda row: images.encoded(sample_of[row]) if row in sample_of else None, THUMBNAIL
    )


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
            index.row_of(key)
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
    path: Path, results: Sequence[Query], index: SearchIndex, thumbnails: Thumbnails
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
        title="Search results",
        index=index,
        results=[
            (query, query_picture(query), [(hit, thumbnails(hit.row)) for hit in query.hits])
            for query in results
        ],
    )
