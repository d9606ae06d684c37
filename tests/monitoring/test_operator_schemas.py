"""PodMonitor and PrometheusRule, held strictly to the schemas of the Prometheus operator."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from monitors import MONITORING

PACKAGE = "@kubernetes-models/prometheus-operator"
VERSION = "6.0.0"
SETUP = Path(__file__).parents[2] / ".setup" / "npm"
SCRIPT = Path(__file__).parent / "operator_schemas.mjs"
QUIET = [
    "--no-audit",
    "--no-fund",
    "--no-save",
    "--ignore-scripts",
    "--loglevel=error",
    "--fetch-retries=1",
]


@pytest.fixture(scope="module")
def schemas():
    """The package that has the operator's schemas, in .setup/npm; installed where it is not there
    yet.
    """
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs npm, which installs the operator's schemas")
    record = SETUP / "node_modules" / PACKAGE / "package.json"
    if not record.exists() or json.loads(record.read_text())["version"] != VERSION:
        SETUP.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", f"--prefix={SETUP}", *QUIET, f"{PACKAGE}@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip()[-300:]}")
    return record.parent


@pytest.fixture(scope="module")
def built():
    """What is applied, by kind."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the manifests")
    done = subprocess.run(
        ["kubectl", "kustomize", str(MONITORING)], check=True, capture_output=True, text=True
    )
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout)}


def problems(schemas, *manifests):
    """What the operator's schemas have against them."""
    command = ["node", str(SCRIPT), str(schemas)]
    done = subprocess.run(
        command, input=json.dumps(manifests), check=True, capture_output=True, text=True
    )
    return [problem.partition(":")[0] for problem in json.loads(done.stdout)]


def test_the_operator_knows_every_field_and_takes_every_value(schemas, built):
    assert problems(schemas, built["PodMonitor"], built["PrometheusRule"]) == []


def test_grafana_finds_the_dashboard_in_a_config_map(built):
    config_map = built["ConfigMap"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    for name, file in (("distap.json", "dashboard.json"), ("distap-fleet.json", "fleet.json")):
        assert config_map["data"][name] == (MONITORING / file).read_text()
