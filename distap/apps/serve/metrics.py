"""Prometheus metrics of a server."""

import platform

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.process_collector import ProcessCollector

from distap import __version__
from distap.apps.serve.problems import UPLOAD_REASONS

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
NAMESPACE = "distap_search"


class ServingMetrics:
    """What a server counts; each server has its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("build", "Versions", namespace=NAMESPACE, registry=registry).info(
            {"version": __version__, "torch": torch.__version__, "python": platform.python_version()}
        )
        self._requests = Counter(
            "requests", "Requests answered", ["route", "status"], namespace=NAMESPACE, registry=registry
        )
        self._seconds = Histogram(
            "request_duration_seconds",
            "Seconds from a request's headers to the end of its answer",
            ["route"],
            buckets=BUCKETS,
            namespace=NAMESPACE,
            registry=registry,
        )
        self._refused = Counter(
            "uploads_refused",
            "Uploads that were not searched for",
            ["reason"],
            namespace=NAMESPACE,
            registry=registry,
        )
        self.in_flight = Gauge("requests_in_flight", "Requests under way", namespace=NAMESPACE, registry=registry)
        self.images = Gauge("index_images", "Images in the index", namespace=NAMESPACE, registry=registry)
        # Series that exist from the start can be alerted on before their first event.
        for reason in UPLOAD_REASONS:
            self._refused.labels(reason)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request to one of the server's routes was answered."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def refused(self, reason: str) -> None:
        """An upload was not searched for."""
        self._refused.labels(reason).inc()

    def text(self) -> bytes:
        """As Prometheus reads them."""
        return generate_latest(self._registry)
