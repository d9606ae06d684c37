"""A real Prometheus scrapes a training: every query of the dashboards finds a series."""

import json
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import yaml
from monitors import boards, is_of_server, panel_expressions, plain_rules, program
from servers import free_ports
from small_trainings import recipe

from distap.telemetry.endpoint import Endpoint
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

pytestmark = pytest.mark.slow
VARIABLES = {
    "$namespace": ".*",
    "$job": "emoji",
    "$window": "5m",
    "$__range": "10m",
    "$price": "2.5",
}
# What a training on a CPU does not have: GPUs, and alerts that fire.
ABSENT = ("DCGM_", "distap_gpus:count", "ALERTS")
SECONDS = 120  # within which each query has to find a series


def query(port, expression):
    """The series that Prometheus finds."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)["data"]["result"]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, training_shards):
    """The port of a Prometheus that scrapes a training on two data sets."""
    folder = tmp_path_factory.mktemp("scraped")
    metrics = free_ports(2)  # the first of two
    port = metrics + 1
    rules = yaml.safe_load(plain_rules())
    labels = {"namespace": "ml", "owner": "ann", "team": "vision"}
    settings = {
        "global": {
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "evaluation_interval": "500ms",
        },
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "emoji",
                "static_configs": [{"targets": [f"127.0.0.1:{metrics}"], "labels": labels}],
            }
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    train, validation = map(str, training_shards)
    trained = recipe(
        folder / "run",
        training_shards,
        steps=8,
        data__train={"a": train, "b": f"{train}[:0.5]"},
        data__validation=validation,
        evaluation={"every": 4},
        checkpoint={"every": 4},
    )
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with Endpoint().served(metrics, "127.0.0.1") as endpoint:
        trainer = Trainer(prepare(trained, World(), endpoint), World())
        with subprocess.Popen(command) as prometheus:
            step = trainer.step

            def scraped_step(share, learning_rate):
                """Let every step be seen, as those of minutes are."""
                result = step(share, learning_rate)
                seen = len(endpoint.scrapes) and endpoint.scrapes[-1]
                while not endpoint.scrapes or endpoint.scrapes[-1] == seen:
                    assert prometheus.poll() is None
                    time.sleep(0.02)
                return result

            trainer.step = scraped_step
            try:
                trainer.train()
                yield port
            finally:
                prometheus.terminate()


def test_every_query_of_the_dashboards_finds_a_series(scraped):
    expressions = {
        (title, expression)
        for board in boards()
        for title, panel in panel_expressions(board).items()
        for expression in panel
        if not is_of_server(expression) and not any(name in expression for name in ABSENT)
    }
    assert len(expressions) > 50
    until = time.monotonic() + SECONDS
    while expressions and time.monotonic() < until:
        expressions = {entry for entry in expressions if not query(scraped, entry[1])}
        time.sleep(0.2)
    assert expressions == set()


def test_figures_keep_whom_they_are_for(scraped):
    [series] = query(scraped, "namespace_job:distap_ended:max == 1")
    assert series["metric"] == {
        "__name__": "namespace_job:distap_ended:max",
        "namespace": "ml",
        "job": "emoji",
        "owner": "ann",
        "team": "vision",
    }
