"""A page with queries and what was found for them; one file that shows its pictures without any other."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from distap.apps.search.pictures import Pictures, small
from distap.apps.search.queries import Found, Query
from distap.apps.search.searcher import Searcher
from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.pages.markup import definitions, note, picture
from distap.pages.page import write_page
from distap.retrieval.index_files import Hit


def write_hits(path: Path, found: Sequence[Found], searcher: Searcher, pictures: Pictures) -> None:
    """Write the page, whole or not at all.

    Args:
        path: of the HTML file; its folder is made.
        found: in the order of the page.
        searcher: that found them.
        pictures: of its gallery.
    """
    index = searcher.index
    facts = {
        "gallery": index.data,
        "images": f"{len(index):,}",
        "index": str(index.about["index"]["kind"]),
        "described": f"{index.described_by.sizing}, {index.dimensions} dimensions",
    }
    body = definitions(facts) + "".join(_example(each, searcher, pictures) for each in found)
    write_page(path, "What was found", body)


def _example(found: Found, searcher: Searcher, pictures: Pictures) -> str:
    name = found.query.name
    query = picture(_query_picture(found.query, searcher, pictures), f"query: {name}")
    hits = "".join(_hit(rank, hit, pictures) for rank, hit in enumerate(found.hits, 1))
    told = "" if found.hits else note(found.problem or "nothing was found")
    return (
        f'<div class="example"><div class="query">{query}<h3>{escape(name)}</h3></div>'
        f'<div class="row">{told}<div class="hits">{hits}</div></div></div>\n'
    )


def _hit(rank: int, hit: Hit, pictures: Pictures) -> str:
    about = f"{rank}: {hit.key}, {hit.class_name or 'no class'}, similarity {hit.similarity:.4f}"
    lines = (f"{rank}. {hit.similarity:.3f}", hit.class_name, hit.key)
    small = "".join(f'<small title="{escape(line)}">{escape(line)}</small>' for line in lines if line)
    return f'<div><div class="hit plain">{picture(pictures.thumbnail(hit.row), about)}</div>{small}</div>'


def _query_picture(query: Query, searcher: Searcher, pictures: Pictures) -> bytes | None:
    if query.key is not None:
        return pictures.thumbnail(searcher.index.row_of(query.key))
    assert query.file is not None
    try:
        image = EncodedImage(query.file.read_bytes())
        return small(image)
    except (OSError, DamagedImageError):
        return None
