"""Prometheus and what is written for it in k8s/monitoring, as the tests of monitoring need them."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from launching import ROOT, Job, started

MONITORING = ROOT / "k8s/monitoring"


def plain_rules() -> str:
    """The rule file that the guide to monitoring takes out of the PrometheusRule."""
    return dedent((MONITORING / "prometheusrule.yaml").read_text().partition("\nspec:\n")[2])


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """What promtool says."""
    return subprocess.run([program("promtool"), *arguments], input=given, capture_output=True, text=True)


def program(name: str) -> str:
    """Where a program of Debian's package prometheus is; the test is skipped where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} (apt-get install prometheus)")
    return path


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules that are an `alert`, or that `record`."""
    groups = yaml.safe_load(plain_rules())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def is_of_server(expression: str) -> bool:
    """Whether it is about a search server, and not about trainings."""
    return "distap_search_" in expression


def names_in(expression: str) -> set[str]:
    """The metrics that an expression asks for, recorded ones included."""
    without_texts = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(?:[a-z_]+:)?(?:distap|process)_[a-z0-9_]+(?::[a-z0-9_]+)?", without_texts))


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return board


def panel_expressions(board: dict[str, Any]) -> dict[str, list[str]]:
    """The expressions of each panel, by its title."""
    return {
        panel["title"]: [one["expr"] for one in panel["targets"]] for panel in board["panels"] if "targets" in panel
    }


def leaves(value: Any, path: str = "") -> set[tuple[str, str]]:
    """The path and the value of everything in parsed JSON that is no list or object, or an empty one."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return set().union(*(leaves(one, f"{path}.{key}") for key, one in entries)) if entries else {(path, repr(value))}


@dataclass(frozen=True)
class Series:
    """One that an expression gave."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """One that was started, by its HTTP API."""

    def __init__(self, url: str, job: Job) -> None:
        self.url, self.job = url, job

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; an error that Prometheus reports fails the test with its text."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=30) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        assert content["status"] == "success", content
        assert not content.get("warnings"), content
        return content["data"]

    def series(self, expression: str, at: float | None = None) -> list[Series]:
        """What an expression gives at a time in seconds since the epoch, or now."""
        when = {} if at is None else {"time": str(at)}
        found = self.get("query", query=expression, **when)["result"]
        return [Series(one["metric"], float(one["value"][1])) for one in found]

    def knows(self, awaited: list[str]) -> bool:
        """Whether each of the expressions has given anything by now; those that did are taken out."""
        awaited[:] = [expression for expression in awaited if not self.series(expression)]
        return not awaited

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=30):
                return True
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, port: int, targets: list[str], training: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a training every second and evaluates its rules as often."""
    folder.mkdir()
    (folder / "rules.yaml").write_text(plain_rules())
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": training, "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address=127.0.0.1:{port}"]
    with started(command, folder) as job:
        server = Prometheus(f"http://127.0.0.1:{port}", job)
        job.wait_until(server.is_ready)
        yield server
