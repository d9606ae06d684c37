"""Write search results as a page."""

from collections.abc import Sequence
from pathlib import Path

from distap.apps.search.queries import Query, SearchResult
from distap.apps.search.searcher import THUMBNAIL
from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.data.images.thumbnails import Thumbnails, thumbnail
from distap.pages.page import write_page
from distap.retrieval.index_files import SearchIndex


def write_search_page(
    path: Path, results: Sequence[SearchResult], index: SearchIndex, thumbnails: Thumbnails
) -> None:
    """Write the results, in their order, as one HTML file; its folder is created."""

    def query_picture(query: Query) -> bytes | None:
        if query.file is None:
            return thumbnails.jpeg(index.row_of(query.key))
        try:
            return thumbnail(EncodedImage(query.file.read_bytes()), THUMBNAIL)
        except (OSError, DamagedImageError):
            return None

    write_page(
        path,
        "search.html",
        title="Search results",
        facts={
            "gallery": index.data,
            "images": f"{len(index):,}",
            "index": index.about["index"]["kind"],
            "described": f"{index.described_by.sizing}, {index.dimensions} dimensions",
        },
        results=[
            (each, query_picture(each.query), [(hit, thumbnails.jpeg(hit.row)) for hit in each.hits])
            for each in results
        ],
    )
