import fsspec.config
import pytest
from servers import web_server


@pytest.fixture(autouse=True)
def _own_options(monkeypatch):
    """Options of fsspec that a test sets are for this test alone."""
    monkeypatch.setattr(fsspec.config, "conf", {})


@pytest.fixture
def web(shards):
    with web_server(shards) as server:
        yield server
