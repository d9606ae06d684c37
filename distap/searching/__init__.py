"""Search by an image or by a key: what `distap search` shows and `distap serve` answers."""

from distap.searching.page import write_hits
from distap.searching.pictures import Pictures, open_pictures
from distap.searching.queries import Found, Query, queries_from
from distap.searching.searcher import Searcher, open_searcher

__all__ = [
    "Found",
    "Pictures",
    "Query",
    "Searcher",
    "open_pictures",
    "open_searcher",
    "queries_from",
    "write_hits",
]
