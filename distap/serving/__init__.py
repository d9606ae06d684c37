"""Search over HTTP: a page, a JSON API, health and metrics."""

from distap.serving.server import serve
from distap.serving.settings import ServeSettings

__all__ = ["ServeSettings", "serve"]
