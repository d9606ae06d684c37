"""What the files of k8s/monitoring say of each other, and of the manifests that they watch."""

import re

from galleries import make_gallery
from monitors import MONITORING, dashboard, is_of_server, names_in, rules
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from distap.apps.search import open_searcher, open_thumbnails
from distap.apps.serve.app import Service, build_app
from distap.apps.serve.limits import ServeSettings
from distap.world import World

RUNBOOK = (MONITORING / "RUNBOOK.md").read_text()


def test_every_alert_links_to_its_entry_in_the_runbook_and_no_entry_is_without_an_alert():
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules("alert")}
    entries = re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)
    assert links == {entry: f"k8s/monitoring/RUNBOOK.md#{entry.lower()}" for entry in entries}


def test_the_runbook_names_panels_of_the_dashboard():
    named = re.findall(r"\*([A-Z][^*]+)\*", re.sub(r"\*\*[^*]+\*\*", "", RUNBOOK))
    assert len(named) > 10
    assert {" ".join(title.split()) for title in named} <= {panel["title"] for panel in dashboard()["panels"]}


def test_alerts_of_servers_ask_for_routes_counters_and_labels_that_servers_have(tmp_path, training_shards):
    gallery = make_gallery(tmp_path, training_shards)
    searcher = open_searcher(gallery.index, gallery.run, world=World())
    service = Service(ServeSettings(), searcher, open_thumbnails(searcher.index))
    service.metrics.requests.labels("/api/search", "200").inc()
    service.metrics.seconds.labels("/api/search").observe(1)
    families = list(text_string_to_metric_families(generate_latest(service.metrics.registry).decode()))
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
