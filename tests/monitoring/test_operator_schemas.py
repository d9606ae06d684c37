"""PodMonitor and PrometheusRule, held strictly to the schemas of the Prometheus operator."""

import copy
import fcntl
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitors import MONITORING

VERSION = "6.0.0"
PACKAGE = "@kubernetes-models/prometheus-operator"
SETUP = Path(__file__).parents[2] / ".setup" / "npm"


@pytest.fixture(scope="session")
def schemas() -> Path:
    """The package that has the operator's schemas, in .setup/npm; installed where it is not there yet."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs npm, which installs the operator's schemas")
    package = SETUP / "node_modules" / PACKAGE
    SETUP.mkdir(parents=True, exist_ok=True)
    with (SETUP / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        about = package / "package.json"
        if not about.exists() or json.loads(about.read_text())["version"] != VERSION:
            quiet = [
                "--no-audit",
                "--no-fund",
                "--no-save",
                "--ignore-scripts",
                "--loglevel=error",
                "--fetch-retries=1",
            ]
            command = ["npm", "install", f"--prefix={SETUP}", *quiet, f"{PACKAGE}@{VERSION}"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            except subprocess.TimeoutExpired:
                pytest.skip(f"npm does not get {PACKAGE} within two minutes")
            if done.returncode:
                pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip()[-300:]}")
    return package


@pytest.fixture(scope="session")
def built() -> dict[str, dict[str, Any]]:
    """What is applied, by kind."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the manifests")
    done = subprocess.run(["kubectl", "kustomize", str(MONITORING)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout)}


def problems(schemas: Path, *manifests: dict[str, Any]) -> list[str]:
    """What the operator's schemas have against them."""
    script = Path(__file__).parent / "operator_schemas.mjs"
    done = subprocess.run(
        ["node", str(script), str(schemas)], input=json.dumps(manifests), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_operator_knows_every_field_and_takes_every_value(schemas, built):
    assert problems(schemas, built["PodMonitor"], built["PrometheusRule"]) == []


def test_an_unknown_field_at_any_depth_a_wrong_type_and_a_missing_field_are_found(schemas, built):
    monitor, rule = copy.deepcopy(built["PodMonitor"]), copy.deepcopy(built["PrometheusRule"])
    monitor["spec"]["jobLable"] = "app.kubernetes.io/instance"
    monitor["spec"]["podMetricsEndpoints"][3]["ports"] = "metrics-3"
    monitor["metadata"]["lables"] = {}
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = "fifteen"
    rule["spec"]["groups"][1]["rules"][0]["For"] = "5m"
    rule["spec"]["groups"][1]["rules"][1]["annotations"]["summary"] = 3
    del rule["spec"]["groups"][0]["name"]
    found = problems(schemas, monitor, rule)
    assert [problem.partition(":")[0] for problem in found] == [
        "PodMonitor/spec/podMetricsEndpoints/0/interval",
        "PodMonitor/metadata/lables",
        "PodMonitor/spec/podMetricsEndpoints/3/ports",
        "PodMonitor/spec/jobLable",
        "PrometheusRule/spec/groups/0",
        "PrometheusRule/spec/groups/1/rules/1/annotations/summary",
        "PrometheusRule/spec/groups/1/rules/0/For",
    ]


def test_grafana_finds_the_dashboard_in_a_config_map(built):
    config_map = built["ConfigMap"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["distap.json"]) == json.loads((MONITORING / "dashboard.json").read_text())
