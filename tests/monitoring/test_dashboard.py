"""The dashboard: Grafana's own schema, what its panels say of themselves, and the metrics that
distap exports.
"""

import copy
import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from monitors import boards, dashboard, leaves, names_in, panel_expressions, promtool, rules
from prometheus_client import CollectorRegistry, Metric, generate_latest

from distap.apps.serve.guard import ServingMetrics
from distap.data.images.damage import REASONS
from distap.telemetry.metrics import TrainingMetrics

# Of Prometheus's annotations, which the schema of dashboards leaves to the data source.
OF_ANNOTATIONS = {"step", "titleFormat", "textFormat"}


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def families() -> list[Metric]:
    """The metrics that rank 0 or a server exports."""
    registry = CollectorRegistry()
    TrainingMetrics(True, REASONS, registry)
    return [*registry.collect(), *ServingMetrics().registry.collect()]


@pytest.fixture(scope="module")
def exported(families) -> dict[str, set[str]]:
    """The series of each metric, by its name; of a summary its sum and count."""
    suffixes = {
        "counter": ["_total"],
        "summary": ["_sum", "_count"],
        "histogram": ["_bucket"],
        "info": ["_info"],
    }
    return {
        item.name: {item.name + suffix for suffix in suffixes.get(item.type, [""])}
        for item in families
    }


def unknown_to_grafana(board: dict[str, Any]) -> set[str]:
    """Paths of what Grafana's models do not hold, such as a key that is misspelt."""
    register_default_plugins()
    held = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(board))))
    missing = {path for path, value in leaves(board) - leaves(held) if value != "{}"}
    return {path for path in missing if path.rpartition(".")[2] not in OF_ANNOTATIONS}


@pytest.mark.parametrize("board", boards(), ids=["training", "all trainings"])
def test_grafana_knows_every_key_of_a_dashboard(board):
    assert unknown_to_grafana(board) == set()
    board["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"
    assert unknown_to_grafana(board) == {".panels.0.fieldConfig.defaults.units"}


def test_every_query_is_of_the_chosen_data_source_namespace_and_training(panels):
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        for target in panel["targets"]:
            selectors = re.findall(r"\{([^}]*)\}", target["expr"])
            assert selectors, target["expr"]
            for selector in selectors:
                assert 'namespace=~"$namespace", job="$job"' in selector, target["expr"]
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()["panels"]))) <= variables


def test_every_metric_that_is_asked_for_is_exported_or_recorded_and_rates_are_of_counters_alone(
    families, exported
):
    shown = [
        item
        for board in boards()
        for expressions in panel_expressions(board).values()
        for item in expressions
    ]
    asked = [*shown, *(rule["expr"] for rule in rules("alert") + rules("record"))]
    names = set().union(*map(names_in, asked))
    assert len(names) > 30
    assert names - {rule["record"] for rule in rules("record")} <= set().union(*exported.values())
    # Of a gauge a rate would look right, and mean nothing.
    types = {series: item.type for item in families for series in exported[item.name]}
    types |= {f"{item.name}_count": item.type for item in families if item.type == "histogram"}
    rated = {name for item in asked for name in re.findall(r"(?:rate|increase)\((\w+)", item)}
    assert {types[name] for name in rated} == {"counter", "summary", "histogram"}


def test_promtool_passes_what_a_rank_and_a_server_answer():
    registry = CollectorRegistry()
    TrainingMetrics(True, REASONS, registry)
    for exposition in map(generate_latest, (registry, ServingMetrics().registry)):
        done = promtool("check", "metrics", given=exposition.decode())
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_figure_that_distap_exports_is_shown(exported, panels):
    shown = set().union(
        *(names_in(target["expr"]) for panel in panels for target in panel["targets"])
    )
    shown |= set().union(
        *(names_in(rule["expr"]) for rule in rules("record") if rule["record"] in shown)
    )
    unseen = {
        name
        for name, series in exported.items()
        if name.startswith("distap_") and not series & shown
    }
    assert unseen == {
        "distap_build",  # versions
        "distap_search_build",
        "distap_search_index_images",  # of the choice of namespace and job
        "distap_last_step_timestamp_seconds",  # of alerts
        "distap_ended",
        "distap_loss_scale",  # of fp16, which the log tells
        "distap_evaluations_since_best",  # of evaluation.patience, which the log tells
        "distap_search_index_generation",  # of updates of an index
        "distap_checkpoint_last_success_timestamp_seconds",
    }
