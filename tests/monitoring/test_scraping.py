"""A real Prometheus scrapes a real training of two ranks: what the alerts and the dashboard ask for is there."""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from launching import Job, Program, started
from monitors import dashboard, panel_expressions, plain_rules, program, promtool, rules
from servers import free_ports
from small_trainings import recipe

from distap.errors import RESTART

pytestmark = pytest.mark.slow
TRAINING = "nets"
# Of a cache that this training does not have, of alerts, which a training that is well has none of, and of a server.
OF_SERVER = {"Seconds of a search", "Requests answered a second", "Requests under way, uploads refused"}
EMPTY = {"Alerts"} | OF_SERVER


@dataclass(frozen=True)
class Series:
    """One that an expression gave."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """One that was started, by its HTTP API."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; an error that Prometheus reports fails the test with its text."""
        content = self._client.get(f"/api/v1/{path}", params=parameters).json()
        assert content["status"] == "success" and not content.get("warnings"), content
        return content["data"]

    def series(self, expression: str, **at: str) -> list[Series]:
        """What an expression gives at a `time` in seconds since the epoch, or now."""
        found = self.get("query", query=expression, **at)["result"]
        return [Series(one["metric"], float(one["value"][1])) for one in found]

    def knows(self, awaited: list[str]) -> bool:
        """Whether each of the expressions has given anything by now; those that did are taken out."""
        awaited[:] = [expression for expression in awaited if not self.series(expression)]
        return not awaited

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").is_success
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path, port: int, targets: list[str]) -> Iterator[tuple[Prometheus, Job]]:
    """A Prometheus that scrapes the training every second and evaluates its rules as often."""
    folder.mkdir()
    (folder / "rules.yaml").write_text(plain_rules())
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": TRAINING, "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address=127.0.0.1:{port}"]
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    with started(command, folder) as job, client:
        server = Prometheus(client)
        job.wait_until(server.is_ready)
        yield server, job


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
        prometheus(folder / "prometheus", port + 2, targets) as (server, job),
        started(Program(launch), folder) as training,
    ):
        awaited = [one for title, expressions in PANELS.items() if title not in EMPTY for one in expressions]
        training.wait_until(lambda: server.knows(awaited), 180)
        now = str(time.time())
        known = {
            "expositions": [httpx.get(f"http://{target}/metrics").text for target in targets],
            "targets": server.series("max_over_time(up[1m])"),
            "answers": {one: server.series(one, time=now) for one in {*ANNOTATIONS}.union(*PANELS.values())},
            "rules": [rule for group in server.get("rules")["groups"] for rule in group["rules"]],
        }
        training.process.send_signal(signal.SIGTERM)
        assert training.status() == RESTART
        # A training that left before its last step is missed.
        job.wait_until(lambda: server.knows(['ALERTS{alertname="DistapTrainingAbsent"}']))
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
