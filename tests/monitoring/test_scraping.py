"""A real Prometheus scrapes a real training of two ranks: what the alerts and the dashboard ask for is there."""

import json
import re
import signal
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest
from launching import Program, started
from monitors import Series, dashboard, panel_expressions, prometheus, promtool, rules
from servers import free_ports
from small_trainings import recipe

from distap.errors import RESTART

pytestmark = pytest.mark.slow
TRAINING = "nets"
# Of a cache that this training does not have, of alerts, which a training that is well has none of, and of a server.
OF_SERVER = {"Seconds of a search", "Requests answered a second", "Requests under way, uploads refused"}
EMPTY = {"Shard cache", "Alerts"} | OF_SERVER


@dataclass(frozen=True)
class Observed:
    """What Prometheus knew of a training before it was stopped."""

    expositions: list[str]  # of each rank, as it answered
    targets: list[Series]
    answers: dict[str, list[Series]]  # to the expressions of the dashboard, all at one time
    rules: list[dict[str, Any]]


def filled_in(expression: str) -> str:
    """As Grafana asks Prometheus once namespace, training and window are chosen."""
    expression = expression.replace("$namespace", ".*").replace("$job", TRAINING).replace("$window", "1m")
    assert "$" not in expression
    return expression


BOARD = dashboard()
PANELS = {title: [filled_in(one) for one in expressions] for title, expressions in panel_expressions(BOARD).items()}
ANNOTATIONS = [filled_in(one["expr"]) for one in BOARD["annotations"]["list"] if "expr" in one]


@pytest.fixture(scope="module")
def observed(tmp_path_factory, training_shards) -> Observed:
    folder = tmp_path_factory.mktemp("scraped")
    port = free_ports(3)
    settings = recipe(
        folder / "run",
        training_shards,
        steps=100_000,
        data__validation=str(training_shards[1]),
        data__pixels={"hold": "spool", "spool_folder": str(folder)},
        checkpoint={"every": 5},
        evaluation={"every": 10},
        metrics={"port": port},
        loggers={"tensorboard": {}},
    )
    (folder / "recipe.yaml").write_text(json.dumps(settings.model_dump(mode="json")))
    targets = [f"127.0.0.1:{port + rank}" for rank in range(2)]
    launch = "-m", "distap.launcher", "--standalone", "--nproc-per-node=2", str(folder / "recipe.yaml")
    with (
        prometheus(folder / "prometheus", port + 2, targets, TRAINING) as server,
        started(Program(launch), folder) as training,
    ):
        awaited = [one for title, expressions in PANELS.items() if title not in EMPTY for one in expressions]
        training.wait_until(lambda: server.knows(awaited), 180)
        now = time.time()
        known = {
            "expositions": [urllib.request.urlopen(f"http://{target}/metrics").read().decode() for target in targets],
            "targets": server.series("max_over_time(up[1m])"),
            "answers": {one: server.series(one, at=now) for one in {*ANNOTATIONS}.union(*PANELS.values())},
            "rules": [rule for group in server.get("rules")["groups"] for rule in group["rules"]],
        }
        training.process.send_signal(signal.SIGTERM)
        assert training.status() == RESTART
        # A training that left before its last step is missed.
        server.job.wait_until(lambda: server.knows(['ALERTS{alertname="DistapTrainingAbsent"}']))
        return Observed(**known)


def test_every_rank_is_scraped_and_promtool_passes_what_it_answers(observed):
    assert [target.value for target in observed.targets] == [1, 1]
    for exposition in observed.expositions:
        done = promtool("check", "metrics", given=exposition)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_panel_of_the_dashboard_shows_a_training_that_is_well(observed):
    shown = {title for title, expressions in PANELS.items() if all(observed.answers[one] for one in expressions)}
    assert shown >= set(PANELS) - EMPTY
    assert observed.answers[ANNOTATIONS[0]] == []  # it was not started again

    def figure(title: str, number: int = 0) -> float:
        [series] = observed.answers[PANELS[title][number]]
        return series.value

    assert figure("Ranks", 0) == figure("Ranks", 1) == 2
    assert 0 < figure("Progress") < 0.1
    assert figure("Images a second") == pytest.approx(25 / figure("Duration of a step"))
    assert sum(series.value for series in observed.answers[PANELS["Waiting for data by rank"][0]]) < 2


def test_every_legend_names_labels_that_its_series_have(observed):
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"pod"}  # of Kubernetes
            for series in observed.answers[filled_in(target["expr"])]:
                assert wanted <= series.labels.keys(), panel["title"]


def test_every_rule_is_evaluated_without_an_error_and_no_alert_fires(observed):
    assert len(observed.rules) == len(rules("alert")) + len(rules("record"))
    assert {rule["health"] for rule in observed.rules} == {"ok"}
    assert {rule["state"] for rule in observed.rules if rule["type"] == "alerting"} <= {"inactive", "pending"}
