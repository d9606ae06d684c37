"""Search over HTTP: a page, a JSON API, health and metrics."""
