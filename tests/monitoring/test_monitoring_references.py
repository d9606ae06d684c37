"""What the files of k8s/monitoring say of each other, and of the manifests that they watch."""

import re
from types import SimpleNamespace

from monitors import MONITORING, dashboard, is_of_server, rules
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from distap.apps.serve.app import build_app
from distap.apps.serve.guard import ServingMetrics
from distap.apps.serve.limits import ServeSettings

RUNBOOKS = {
    name: (MONITORING / name).read_text()
    for name in ("RUNBOOK.md", "runbook-slow.md", "runbook-servers.md")
}


def test_every_alert_links_to_its_entry_in_the_runbook_and_no_entry_is_without_an_alert():
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules("alert")}
    assert links == {
        entry: f"k8s/monitoring/{name}#{entry.lower()}"
        for name, text in RUNBOOKS.items()
        for entry in re.findall(r"^### (\w+)$", text, re.MULTILINE)
    }


def test_the_runbook_names_panels_of_the_dashboard():
    texts = "\n".join(RUNBOOKS.values())
    named = re.findall(r"\*([A-Z][^*]+)\*", re.sub(r"\*\*[^*]+\*\*", "", texts))
    assert len(named) > 10
    assert {" ".join(title.split()) for title in named} <= {
        panel["title"] for panel in dashboard()["panels"]
    }


def test_alerts_of_servers_ask_for_routes_and_labels_that_servers_have():
    metrics = ServingMetrics()
    metrics.requests.labels("/api/search", "200").inc()
    metrics.seconds.labels("/api/search").observe(1)
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    # An application asks its service for anything else only when it answers.
    routes = {
        route.path
        for route in build_app(SimpleNamespace(metrics=metrics, settings=ServeSettings())).routes
    }
    asked = [rule["expr"] for rule in rules("alert") if is_of_server(rule["expr"])]
    assert len(asked) == 4
    for expression in asked:
        for name, matchers in re.findall(r"(distap_search_\w+){([^}]*)}", expression):
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= labels[name]
        for route in re.findall(r'route="([^"]*)"', expression):
            assert route in routes
        for pattern in re.findall(r'route!~"([^"]*)"', expression):
            assert {route for route in routes if re.fullmatch(pattern, route)} == {
                "/healthz",
                "/readyz",
                "/metrics",
            }
