"""A real Prometheus scrapes a training, a search server and what stands in for NVIDIA's exporter:
every query of the dashboards and of the alerts finds a series.
"""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from itertools import chain

import httpx
import pytest
import yaml
from galleries import make_gallery
from monitors import boards, is_of_server, panel_expressions, plain_rules, program, rules
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from servers import free_ports
from serving import MULTIPART, PNG, body, serving
from small_trainings import recipe

from distap.telemetry.endpoint import Endpoint
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

pytestmark = pytest.mark.slow
VARIABLES = {
    "$namespace": ".*",
    "$window": "5m",
    "$__range": "10m",
    "$price": "2.5",
}
TRAINING = {"namespace": "ml", "pod": "emoji-0", "owner": "ann", "team": "vision"}
# What a training on a CPU does not have; rules/state.yaml tries it.
ABSENT = "distap_gpus:count"
# Nor does a server that works answer with a status of 500 or above.
NEVER = (
    'distap_build_info{device!~"cpu|"}',
    'distap_search_requests_total{route!~"/(healthz|readyz|metrics)", status=~"5.."}',
)
SEARCH = "search"
REFUSED = "DistapUploadsRefused"
SELECTOR = re.compile(r"((?:[a-z_]+:)?(?:distap|process)_\w+(?::\w+)?)({[^}]*})?")
SECONDS = 120  # within which each query has to find a series
# As DCGM exporter 4.5 names them in Kubernetes, with the pod that holds the GPU.
OF_GPU = {
    "gpu": "0",
    "UUID": "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",
    "pci_bus_id": "00000000:00:04.0",
    "device": "nvidia0",
    "modelName": "NVIDIA H100",
    "hostname": "node-1",
    "container": "node",
    "namespace": TRAINING["namespace"],
    "pod": TRAINING["pod"],
}


def query(port, expression, job="emoji"):
    """The series that Prometheus finds."""
    for name, value in {**VARIABLES, "$job": job}.items():
        expression = expression.replace(name, value)
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)["data"]["result"]


@pytest.fixture(scope="module")
def server(tmp_path_factory, training_shards):
    """URL of a search server."""
    folder = tmp_path_factory.mktemp("served")
    with serving(make_gallery(folder, training_shards), folder) as (url, _):
        yield url


@pytest.fixture(scope="module")
def gpus():
    """The port of an exporter with the names and labels of NVIDIA's, for a GPU of the training."""
    registry = CollectorRegistry()
    for name, value in (("DCGM_FI_DEV_GPU_UTIL", 93), ("DCGM_FI_DEV_FB_USED", 40_000)):
        metric = Gauge(name, "Stands in for DCGM", list(OF_GPU), registry=registry)
        metric.labels(**OF_GPU).set(value)
        metric.labels(**{**OF_GPU, "gpu": "1", "pod": "another-0"}).set(1)
    port = free_ports(1)
    served, thread = start_http_server(port, "127.0.0.1", registry)
    yield port
    served.shutdown()
    thread.join()
    served.server_close()


def scraping(job, address, labels, **options):
    """A part of Prometheus's settings."""
    static = [{"targets": [address], "labels": labels}]
    return {"job_name": job, "static_configs": static, **options}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, training_shards, server, gpus):
    """The port of a Prometheus that scrapes a training on two data sets, and what is beside it."""
    folder = tmp_path_factory.mktemp("scraped")
    metrics = free_ports(2)  # the first of two
    port = metrics + 1
    written = yaml.safe_load(plain_rules())
    for rule in (rule for group in written["groups"] for rule in group["rules"]):
        if rule.get("alert") == REFUSED:
            rule["for"] = "10s"  # so that it is seen both pending and firing
    seconds = "500ms"
    times = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    of_exporter = {"namespace": "gpu-operator", "pod": "nvidia-dcgm-exporter-x"}
    settings = {
        "global": dict.fromkeys(times, seconds),
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            scraping("emoji", f"127.0.0.1:{metrics}", TRAINING),
            scraping(SEARCH, str(httpx.URL(server).netloc, "ascii"), {"namespace": "ml"}),
            scraping("dcgm", f"127.0.0.1:{gpus}", of_exporter, honor_labels=True),
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(written))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    train, validation = map(str, training_shards)
    trained = recipe(
        folder / "run",
        training_shards,
        steps=8,
        data__train={"a": train, "b": f"{train}[:0.5]"},
        data__validation={"a": validation, "b": f"{validation}[:0.5]"},
        evaluation={"every": 4, "best": {"set": "b", "figure": "mAP"}},
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


def expressions_of(board, is_wanted):
    """The expressions of the panels of a dashboard."""
    shown = chain.from_iterable(panel_expressions(board).values())
    return {item for item in shown if is_wanted(item) and ABSENT not in item}


def without_series(port, expressions, job, ask=lambda: None):
    """Those of the expressions that find no series in time; `ask` has the server answer before
    each try.
    """
    until = time.monotonic() + SECONDS
    while expressions and time.monotonic() < until:
        ask()
        expressions = {item for item in expressions if not query(port, item, job)}
        time.sleep(0.2)
    return expressions


def test_every_query_about_trainings_finds_a_series(scraped):
    expressions = set()
    for board in boards():
        expressions |= expressions_of(board, lambda item: not is_of_server(item))
    expressions = {item for item in expressions if "ALERTS" not in item}
    assert len(expressions) > 60
    assert without_series(scraped, expressions, "emoji") == set()


def test_every_query_about_servers_and_alerts_finds_a_series(scraped, server):
    def ask():
        """Search, and send what is no image."""
        for content in (PNG, b"this is a text"):
            httpx.post(f"{server}/api/search", content=body(content), headers=MULTIPART)

    expressions = expressions_of(boards()[0], is_of_server)
    expressions |= expressions_of(boards()[0], lambda item: "ALERTS" in item)
    assert len(expressions) == 7
    assert without_series(scraped, expressions, SEARCH, ask) == set()


def test_every_series_that_rules_ask_for_is_there(scraped, server):
    httpx.post(f"{server}/api/search", content=body(PNG), headers=MULTIPART)
    selectors = set()
    for rule in rules("alert") + rules("record"):
        selectors |= {name + labels for name, labels in SELECTOR.findall(rule["expr"])}
    selectors = {item for item in selectors if item not in NEVER and ABSENT not in item}
    assert len(selectors) > 35
    assert without_series(scraped, selectors, "emoji") == set()


def test_a_gpu_is_shown_for_the_training_whose_pod_holds_it(scraped):
    panels = panel_expressions(boards()[1])
    for title, value in (
        ("GPU utilisation by training", 0.93),
        ("GPU memory by training", 40_000 * 2**20),
    ):
        [expression] = panels[title]
        [series] = query(scraped, expression)
        assert series["metric"] == {"namespace": "ml", "job": "emoji"}
        assert float(series["value"][1]) == pytest.approx(value)


def test_the_set_that_chooses_the_best_checkpoint_is_marked(scraped):
    panels = panel_expressions(boards()[0])
    unmarked, chosen = panels["mAP"]
    assert [series["metric"] for series in query(scraped, chosen)] == [{"dataset": "b"}]
    assert "b" not in {series["metric"]["dataset"] for series in query(scraped, unmarked)}
    _, chosen = panels["Figures of retrieval"]
    [series] = query(scraped, chosen)
    assert series["metric"] == {"dataset": "b", "figure": "mAP"}


def test_figures_keep_whom_they_are_for(scraped):
    [series] = query(scraped, "namespace_job:distap_ended:max == 1")
    assert series["metric"] == {
        "__name__": "namespace_job:distap_ended:max",
        "namespace": "ml",
        "job": "emoji",
        "owner": "ann",
        "team": "vision",
    }
