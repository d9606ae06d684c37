"""Search by an image or by a key: what `distap search` shows and `distap serve` answers."""

from distap.apps.search.page import write_hits
from distap.apps.search.pictures import Pictures, open_pictures
from distap.apps.search.queries import Found, Query, queries_from
from distap.apps.search.searcher import Searcher, open_searcher

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
