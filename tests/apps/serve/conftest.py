"""A gallery for each file of tests, what searches it, and a server of it."""

import pytest
from galleries import Gallery, make_gallery
from serving import serving

from distap.apps.search import Searcher, open_searcher
from distap.world import World


@pytest.fixture(scope="module")
def gallery(tmp_path_factory, training_shards) -> Gallery:
    return make_gallery(tmp_path_factory.mktemp("served"), training_shards)


@pytest.fixture(scope="module")
def searcher(gallery) -> Searcher:
    """What a server has to answer like."""
    return open_searcher(gallery.index, gallery.run, world=World())


@pytest.fixture(scope="module")
def served(gallery, tmp_path_factory):
    """URL of a server, and its process."""
    with serving(gallery, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def url(served) -> str:
    return served[0]
