"""The compose file, as its published grammar reads it, and what it starts."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose
from monitors import promtool
from torch.distributed.run import get_args_parser

from distap.config.reading import load_recipe
from distap.config.sections import StopSection
from distap.data.shards.parallel import usable_cores
from distap.processes.stopping import MARGIN_SECONDS

FOLDER = Path(__file__).parents[2] / "launch" / "compose"


def compose_text(**environment: str) -> str:
    """The file with its variables filled in, as compose does it."""
    text = (FOLDER / "compose.yaml").read_text()
    filled = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda actual: environment.get(actual[1], actual[2]), text
    )
    return filled.replace("$$", "$")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load(compose_text())["services"]


def test_the_file_is_what_the_compose_specification_allows():
    text = compose_text()
    assert PyCompose.from_json(json.dumps(yaml.safe_load(text))).service_names()
    with pytest.raises(ValueError, match="column"):
        PyCompose.from_json(json.dumps(yaml.safe_load(text.replace("cap_drop:", "cap_dropped:"))))


def test_every_service_is_locked_down_answers_this_machine_only_and_says_when_it_is_healthy(
    services,
):
    for name, service in services.items():
        assert (
            service["read_only"] and service["cap_drop"] == ["ALL"] and "privileged" not in service
        ), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        # Those that are built here have the health check of the Dockerfile.
        assert "build" in service or service["healthcheck"]["test"], name
        for other, options in service.get("depends_on", {}).items():
            assert other in services and options["condition"] == "service_healthy", (name, other)


def test_what_is_mounted_is_there(services):
    named = yaml.safe_load(compose_text())["volumes"]
    for name, service in services.items():
        for source, _, mode in map(_parts, service["volumes"]):
            # which launch/demo makes
            if source not in named and source != "../../data/emoji/shards":
                assert mode == "ro" and (FOLDER / source).exists(), (name, source)


def _parts(volume):
    if isinstance(volume, dict):
        return volume["source"], volume["target"], "ro" if volume["read_only"] else "rw"
    source, target, *mode = volume.split(":")
    return source, target, *(mode or ["rw"])


@pytest.mark.parametrize("name", ["train", "train-gpu"])
def test_the_training_starts_with_arguments_that_it_has_and_time_to_stop(services, name):
    service = services[name]
    settings = get_args_parser().parse_args(service["command"])
    [recipe] = [
        _parts(volume)[0]
        for volume in service["volumes"]
        if _parts(volume)[1] == settings.training_script
    ]
    read = load_recipe(FOLDER / recipe, settings.training_script_args)
    assert (str(read.run), read.metrics.port, read.metrics.address) == (
        "/runs/compose",
        9400,
        "0.0.0.0",
    )
    assert settings.nproc_per_node == "2"
    grace = read.stop.grace_seconds
    assert grace == StopSection().grace_seconds
    assert int(service["stop_grace_period"].removesuffix("s")) > grace + MARGIN_SECONDS


@pytest.mark.parametrize(
    ("given", "ranks", "threads"), [("", "1", None), ("", "1000", "1"), ("3", "2", "3")]
)
def test_the_ranks_share_the_cores_unless_somebody_has_said_otherwise(
    services, given, ranks, threads
):
    service = services["train"]
    assert service["environment"] == {"RANKS": 2, "OMP_NUM_THREADS": ""}
    tini, dashes, *shell, script, name = service["entrypoint"]
    assert [tini, dashes, name] == ["tini", "--", "sh"]
    start = 'exec python -m distap.launcher "$@"'
    assert script.endswith(start + "\n")
    environment = {"PATH": "/usr/bin:/bin", "RANKS": ranks, "OMP_NUM_THREADS": given}
    shown = script.replace(start, 'echo "$OMP_NUM_THREADS" "$@"')
    done = subprocess.run(
        [*shell, shown, name, "--standalone"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [threads or str(usable_cores()), "--standalone"]


def test_prometheus_takes_its_settings_with_the_rules_and_targets_that_its_service_writes(
    services, tmp_path
):
    *shell, script = [*services["prometheus"]["entrypoint"], *services["prometheus"]["command"]]
    mounted = {
        _parts(volume)[1]: str(FOLDER / _parts(volume)[0])
        for volume in services["prometheus"]["volumes"]
    }
    script = script.partition("exec prometheus")[0].replace("/tmp/", f"{tmp_path}/")
    script = re.sub(r"/etc/prometheus/\S+", lambda path: mounted[path[0]], script)
    subprocess.run([*shell, script], env={"PATH": "/usr/bin:/bin", "RANKS": "3"}, check=True)
    settings = (
        Path(mounted["/etc/prometheus/prometheus.yml"]).read_text().replace("/tmp/", f"{tmp_path}/")
    )
    (tmp_path / "prometheus.yml").write_text(settings)
    targets = yaml.safe_load((tmp_path / "targets.yaml").read_text())
    assert [entry["targets"] for entry in targets] == [
        [f"training:{port}"] for port in (9400, 9401, 9402)
    ]
    assert services["train"]["networks"]["default"]["aliases"] == ["training"]
    checked = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert checked.returncode == 0 and "rules found" in checked.stdout, checked.stderr


def test_grafana_finds_prometheus_and_the_dashboard(services):
    grafana = services["grafana"]
    mounted = {_parts(volume)[1]: FOLDER / _parts(volume)[0] for volume in grafana["volumes"]}
    [source] = yaml.safe_load(
        mounted["/etc/grafana/provisioning/datasources/distap.yaml"].read_text()
    )["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    [provider] = yaml.safe_load(
        mounted["/etc/grafana/provisioning/dashboards/distap.yaml"].read_text()
    )["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert json.loads(mounted[home].read_text())["uid"]
