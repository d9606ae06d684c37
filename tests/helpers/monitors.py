"""What is written for Prometheus and Grafana in k8s/monitoring."""

import json
import re
import shutil
import subprocess
from textwrap import dedent
from typing import Any

import pytest
import yaml
from launching import ROOT

MONITORING = ROOT / "k8s/monitoring"


def plain_rules() -> str:
    """The rule file that the guide to monitoring takes out of the PrometheusRule."""
    return dedent((MONITORING / "prometheusrule.yaml").read_text().partition("\nspec:\n")[2])


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """What promtool says."""
    return subprocess.run(
        [program("promtool"), *arguments], input=given, capture_output=True, text=True
    )


def program(name: str) -> str:
    """Where a program of Debian's package prometheus is; the test is skipped where it is not
    installed.
    """
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
    return set(
        re.findall(r"\b(?:[a-z_]+:)?(?:distap|process)_[a-z0-9_]+(?::[a-z0-9_]+)?", without_texts)
    )


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return board


def boards() -> list[dict[str, Any]]:
    """All dashboards: that of one training, and that of all."""
    return [dashboard(), json.loads((MONITORING / "fleet.json").read_text())]


def panel_expressions(board: dict[str, Any]) -> dict[str, list[str]]:
    """The expressions of each panel, by its title."""
    return {
        panel["title"]: [entry["expr"] for entry in panel["targets"]]
        for panel in board["panels"]
        if "targets" in panel
    }


def leaves(value: Any, path: str = "") -> set[tuple[str, str]]:
    """The path and the value of everything in parsed JSON that is no list or object, or an empty
    one.
    """
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return (
        set().union(*(leaves(item, f"{path}.{key}") for key, item in entries))
        if entries
        else {(path, repr(value))}
    )
