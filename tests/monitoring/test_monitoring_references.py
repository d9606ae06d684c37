"""What the files of k8s/monitoring say of each other, and of the manifests that they watch."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from monitors import MONITORING, ROOT, dashboard, is_of_server, names_in, rules
from prometheus_client.parser import text_string_to_metric_families

from distap.apps.serve.app import build_app
from distap.apps.serve.service import Service
from distap.apps.serve.settings import ServeSettings

RUNBOOK = (MONITORING / "RUNBOOK.md").read_text()
VARIANTS = sorted(folder.name for folder in (ROOT / "k8s" / "overlays").iterdir())


@pytest.fixture(scope="module")
def monitor() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())["spec"]
    return spec


def built(variant: str) -> list[dict[str, Any]]:
    """The manifests of an overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the manifests")
    folder = ROOT / "k8s" / "overlays" / variant
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pods(part: Any) -> Iterator[dict[str, Any]]:
    """The pod templates anywhere in a manifest."""
    if isinstance(part, list):
        for one in part:
            yield from pods(one)
    elif isinstance(part, dict):
        if "containers" in part.get("spec", {}):
            yield part
        for one in part.values():
            yield from pods(one)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pod_monitor_finds_every_rank_of_a_training_and_the_network_lets_it(monitor, variant):
    manifests = built(variant)
    watched = [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]]
    found = list(pods(manifests))
    assert found
    for pod in found:
        labels = pod["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        assert monitor["jobLabel"] in labels
        named = [port["name"] for container in pod["spec"]["containers"] for port in container["ports"]]
        of_ranks = [name for name in named if name.startswith("metrics-")]
        assert of_ranks
        assert set(of_ranks) <= set(watched)
    assert watched.pop() == "http"
    [policy] = [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    [ports] = [rule["ports"] for rule in policy["spec"]["ingress"] if "ports" in rule]
    assert [(one["port"], one["endPort"]) for one in ports] == [(9400, 9400 + len(watched) - 1)]


def test_every_alert_links_to_its_entry_in_the_runbook_and_no_entry_is_without_an_alert():
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules("alert")}
    entries = re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)
    assert links == {entry: f"k8s/monitoring/RUNBOOK.md#{entry.lower()}" for entry in entries}


def test_each_entry_of_the_runbook_says_how_long_it_may_wait_what_to_look_at_and_what_to_do():
    for entry in re.split(r"^#{2,3} ", RUNBOOK, flags=re.MULTILINE):
        if entry.startswith("Distap"):
            parts = re.findall(r"^\*\*([^*]+)\*\*: ", entry, re.MULTILINE)
            assert parts == ["Means", "May wait", "Look at", "Do"], entry


def test_the_runbook_names_panels_of_the_dashboard():
    named = re.findall(r"\*([A-Z][^*]+)\*", re.sub(r"\*\*[^*]+\*\*", "", RUNBOOK))
    assert len(named) > 10
    assert {" ".join(title.split()) for title in named} <= {panel["title"] for panel in dashboard()["panels"]}


def test_alerts_of_servers_ask_for_routes_counters_and_labels_that_servers_have():
    service = Service(ServeSettings())
    service.metrics.requests.labels("/api/search", "200").inc()
    service.metrics.seconds.labels("/api/search").observe(1)
    families = list(text_string_to_metric_families(service.metrics.text().decode()))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    counted = {sample.name for one in families if one.type in ("counter", "histogram") for sample in one.samples}
    routes = {route.path for route in build_app(service).routes}
    asked = [rule["expr"] for rule in rules("alert") if is_of_server(rule["expr"])]
    assert len(asked) == 4
    for expression in asked:
        assert names_in(expression) <= set(labels)
        assert set(re.findall(r"rate\((\w+)", expression)) <= counted
        for name, matchers in re.findall(r"(distap_search_\w+){([^}]*)}", expression):
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= labels[name]
        for route in re.findall(r'route="([^"]*)"', expression):
            assert route in routes
        for pattern in re.findall(r'route!~"([^"]*)"', expression):
            assert {route for route in routes if re.fullmatch(pattern, route)} == {"/healthz", "/readyz", "/metrics"}
    service.close()
