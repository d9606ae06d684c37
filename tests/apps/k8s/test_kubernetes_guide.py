import re
import shlex
import subprocess
import sys

import pytest
import yaml
from built_manifests import GUIDE, K8S, OVERLAYS, RECIPE, TRAIN_JOB, needs_kubectl, objects_of
from manifest_checks import OPERATOR_MODELS, leaves
from manifest_parts import parts_of

from distap.cli import main


def test_the_command_of_the_guide_writes_a_training(tmp_path, monkeypatch):
    (command,) = re.findall(r"    (distap k8s render (?:.*\\\n)+.*)", GUIDE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.setattr(sys, "argv", shlex.split(command.replace("\\\n", "")))
    with pytest.raises(SystemExit) as status:
        main()
    assert not status.value.code
    assert (tmp_path / "emoji" / "kustomization.yaml").is_file()


def test_the_train_job_of_the_guide_is_valid():
    job = yaml.safe_load(TRAIN_JOB)
    lost = set(leaves(job)) - set(leaves(OPERATOR_MODELS["TrainJob"].from_dict(job).to_dict()))
    assert not lost


@needs_kubectl
def test_the_train_job_of_the_guide_fits_the_runtime():
    ours, runtime = yaml.safe_load(TRAIN_JOB)["spec"], parts_of(objects_of("trainjob-gpu"))
    assert ours["runtimeRef"] == runtime.outer["spec"]["runtimeRef"]
    assert ours["trainer"]["numProcPerNode"] == len(runtime.metrics_ports)
    given = [one.replace("/etc/emoji", "/etc/distap").replace("emoji", "distap") for one in ours["trainer"]["args"]]
    assert given == runtime.container["args"]
    (patch,) = ours["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == runtime.container["name"]


def test_the_network_policy_of_the_guide_selects_the_pods_of_its_train_job():
    (command,) = re.findall(r"    (sed .*) \\\n +\| kubectl apply", GUIDE)
    words = shlex.split(command.replace("k8s/base", str(K8S / "base")))
    policy = yaml.safe_load(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    (patch,) = yaml.safe_load(TRAIN_JOB)["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["metadata"]["labels"]
    shared = {"app.kubernetes.io/name": "distap", "app.kubernetes.io/component": "trainer"}
    selectors = [policy["spec"]["podSelector"], policy["spec"]["ingress"][0]["from"][0]["podSelector"]]
    assert selectors == [{"matchLabels": shared | pod}] * 2
    assert policy["metadata"]["name"] == "emoji"


def test_the_guide_names_what_there_is():
    for overlay in re.findall(r"overlays/([a-z-]+)", GUIDE):
        assert overlay in OVERLAYS
    for component in re.findall(r"(?<!/)components/([a-z-]+)", GUIDE):
        assert (K8S / "components" / component / "kustomization.yaml").is_file()
