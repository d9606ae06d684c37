"""Ask the endpoints of a training's ranks on this machine what they do."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

SECONDS = 1.0  # in which a rank has to answer
MOST_BYTES = 2**20  # of an answer
MORE_PORTS = 16  # that are asked beyond one a rank, since a rank passes over a port that is taken
FIGURES = ("step", "images_per_second", "host_memory_peak_bytes", "device_memory_peak_bytes")  # names after `distap_`


def ask_ranks(run: str, ranks: int, port: int, address: str) -> dict[int, dict[str, Any]]:
    """Ask the ranks of the run with this `run_key`; return by rank `status`, `activity`, its `seconds` and FIGURES.

    Ranks of other machines, or without an answer in time, are left out; `port` and `address` are the recipe's.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    ports = range(port, min(port + ranks + MORE_PORTS, 65536))
    with ThreadPoolExecutor(MORE_PORTS) as threads:
        answers = list(threads.map(lambda one: _ask(host, one, run), ports))
    return {answer["rank"]: answer for answer in answers if answer}


def _ask(host: str, port: int, run: str) -> dict[str, Any] | None:
    try:
        said = json.loads(_got(host, port, "/readyz"))
        if not isinstance(said, dict) or said.get("run") != run:
            return None  # another run's rank, or another program
        families = {each.name: each for each in text_string_to_metric_families(_got(host, port, "/metrics"))}
        values = {name: families[f"distap_{name}"].samples for name in FIGURES if f"distap_{name}" in families}
        return {**said, **{name: samples[0].value for name, samples in values.items() if samples}}
    except (OSError, ValueError, HTTPException):
        return None


def _got(host: str, port: int, path: str) -> str:
    with closing(HTTPConnection(host, port, timeout=SECONDS)) as connection:  # which asks no proxy
        connection.request("GET", path)
        return connection.getresponse().read(MOST_BYTES).decode()
