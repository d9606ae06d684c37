"""Search over HTTP: a page, a JSON API, health and metrics."""

from distap.apps.serve.server import serve
from distap.apps.serve.settings import ServeSettings

__all__ = ["ServeSettings", "serve"]
