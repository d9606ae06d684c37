"""The dashboard: Grafana's own schema, what its panels say of themselves, and the metrics that distap exports."""

import copy
import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from monitors import dashboard, names_in, panel_expressions, rules
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from distap.apps.serve.guard import ServingMetrics
from distap.data.images.decoding import REASONS
from distap.telemetry.metrics import STAGES, TrainingMetrics

# Of Prometheus's annotations, which the schema of dashboards leaves to the data source.
OF_ANNOTATIONS = {"step", "titleFormat", "textFormat"}


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The series of each metric that rank 0 or a server exports, by its name; of a summary its sum and count."""
    registry = CollectorRegistry()
    TrainingMetrics(True, REASONS, registry)
    of_server = text_string_to_metric_families(ServingMetrics().text().decode())
    suffixes = {"counter": ["_total"], "summary": ["_sum", "_count"], "histogram": ["_bucket"], "info": ["_info"]}
    return {
        family.name: {family.name + suffix for suffix in suffixes.get(family.type, [""])}
        for family in [*registry.collect(), *of_server]
    }


def lost(given: Any, taken: Any, path: str = "") -> list[str]:
    """What of `given` is missing or another in `taken`."""
    if isinstance(given, dict) and isinstance(taken, dict):
        return [one for key in given for one in lost(given[key], taken.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        return [
            one
            for at, (mine, other) in enumerate(zip(given, taken, strict=True))
            for one in lost(mine, other, f"{path}/{at}")
        ]
    return [] if given == taken else [path]


def unknown_to_grafana(board: dict[str, Any]) -> list[str]:
    """Keys that Grafana's models do not hold."""
    register_default_plugins()
    held = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(board))))
    return [path for path in lost(board, held) if path.rpartition("/")[2] not in OF_ANNOTATIONS]


def test_grafana_knows_every_key_of_the_dashboard():
    board = dashboard()
    assert unknown_to_grafana(board) == []
    board["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    board["templating"]["list"][1]["includeal"] = True
    assert unknown_to_grafana(board) == ["/templating/list/1/includeal", "/panels/1/fieldConfig/defaults/units"]


def test_no_panel_lies_over_another():
    taken = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_panel_says_what_it_shows_and_in_which_unit(panels):
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    assert len({panel["title"] for panel in panels}) == len(panels)


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


def test_every_metric_of_dashboard_and_rules_is_one_that_distap_exports_or_a_recorded_one(exported):
    shown = [one for expressions in panel_expressions(dashboard()).values() for one in expressions]
    asked_for = set().union(*map(names_in, [*shown, *(rule["expr"] for rule in rules("alert") + rules("record"))]))
    recorded = {rule["record"] for rule in rules("record")}
    assert len(asked_for) > 30
    assert asked_for - recorded <= set().union(*exported.values())


def test_every_figure_that_distap_exports_is_shown(exported, panels):
    shown = set().union(*(names_in(target["expr"]) for panel in panels for target in panel["targets"]))
    shown |= set().union(*(names_in(rule["expr"]) for rule in rules("record") if rule["record"] in shown))
    unseen = {name for name, series in exported.items() if name.startswith("distap_") and not series & shown}
    assert unseen == {
        "distap_build",  # versions
        "distap_search_build_info",
        "distap_search_index_images",  # of the choice of namespace and job
        "distap_last_step_timestamp_seconds",  # of alerts
        "distap_checkpoint_last_success_timestamp_seconds",
        "distap_host_memory_used_ratio",
    }


def test_the_stack_of_stages_has_a_colour_for_each_stage(panels):
    [stack] = [panel for panel in panels if panel["title"] == "Seconds of a step by stage"]
    assert stack["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    assert {override["matcher"]["options"] for override in stack["fieldConfig"]["overrides"]} == set(STAGES)
