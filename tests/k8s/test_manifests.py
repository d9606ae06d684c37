"""Every overlay and task of k8s/: kustomize builds it, schemas know it, and its names, ports, times
and paths fit.
"""

import math
import re
import shutil
import subprocess
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from monitors import leaves
from torch.distributed.run import get_args_parser

from distap.cli import app
from distap.config.reading import load_recipe
from distap.errors import MISTAKE, RESTART
from distap.processes.shared_values import SECRET
from distap.processes.stopping import MARGIN_SECONDS

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
TASKS = ["evaluate", "extract", "serve"]
NAMESPACED = {
    "ConfigMap",
    "Job",
    "JobSet",
    "NetworkPolicy",
    "Service",
    "TrainJob",
    "TrainingRuntime",
}
KUBERNETES = "1.37"
OPERATORS_PORT = "29500"
MODELS = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "JobsetV1alpha2JobSet"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "TrainerV1alpha1TrainJob"),
    "TrainingRuntime": ("trainer.kubeflow.org/v1alpha1", "TrainerV1alpha1TrainingRuntime"),
}
MONITOR = yaml.safe_load((K8S / "monitoring/podmonitor.yaml").read_text())["spec"]
# At these, clouds hand out the credentials of a machine.
METADATA = [
    "169.254.169.254",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "169.254.170.23",
    "fd00:ec2::254",
]
BYTES = {"Gi": 2**30, "Ti": 2**40}


@cache
def built(folder: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the manifests")
    done = subprocess.run(
        ["kubectl", "kustomize", str(K8S / folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects_in(folder: str) -> dict[str, Any]:
    """The objects of a build by kind, in its order."""
    return {entry["kind"]: entry for entry in yaml.safe_load_all(built(folder))}


def job_of(objects: dict[str, Any]) -> dict[str, Any]:
    """The spec of the Job, wherever it stands."""
    if "TrainingRuntime" in objects:
        (job,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        return job["template"]["spec"]
    if "JobSet" in objects:
        (job,) = objects["JobSet"]["spec"]["replicatedJobs"]
        return job["template"]["spec"]
    return (objects.get("Job") or objects["Deployment"])["spec"]


def variables_of(container: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """Variables of a container as the kubelet resolves them, in order."""
    variables = {"NAMESPACE": "research"}
    for entry in container["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        label = re.search(r"labels\['(.+)'\]", path)
        variables[entry["name"]] = (
            labels[label[1]] if label else expanded(entry.get("value", "research"), variables)
        )
    return variables


def expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def quantity(text: str) -> int:
    return int(text[:-2]) * BYTES[text[-2:]]


def check_schemas(objects: dict[str, Any]) -> None:
    # takes a second, which workers without these tests save
    from kubeflow_trainer_api import models

    for kind, entry in objects.items():
        # the models drop what they do not know, so nothing may be lost on the way
        if kind in MODELS:
            version, model = MODELS[kind]
            assert entry["apiVersion"] == version
            assert (
                leaves(entry) - leaves(getattr(models, model).from_dict(entry).to_dict()) == set()
            )
        else:
            kubernetes_validate.validate(entry, KUBERNETES, strict=True)
    if "Deployment" not in objects:
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "inner"},
            "spec": job_of(objects),
        }
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def check_pods(objects: dict[str, Any]) -> None:
    """What holds of trainings and tasks alike: selectors, security, volumes, network and exit
    statuses.
    """
    job = job_of(objects)
    policy = objects["NetworkPolicy"]["spec"]
    labels = job["template"]["metadata"]["labels"]
    assert {*MONITOR["podTargetLabels"]} == {"owner", "team"} <= labels.keys()
    pod = job["template"]["spec"]
    name = labels["app.kubernetes.io/instance"]
    named = [entry["metadata"] for kind, entry in objects.items() if kind != "ConfigMap"]
    assert {(entry["name"], entry["namespace"]) for entry in named} == {(name, "research")}
    selectors = [
        policy["podSelector"],
        policy["ingress"][0]["from"][0]["podSelector"],
        MONITOR["selector"],
    ]
    selectors += (
        [{"matchLabels": objects["Service"]["spec"]["selector"]}] if "Service" in objects else []
    )
    assert all(entry["matchLabels"].items() <= labels.items() for entry in selectors)
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == name
    assert all(not lets_out(policy, address) for address in METADATA)
    assert lets_out(policy, "52.216.0.1") and lets_out(policy, "2600:1fa0::1")
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == 10001
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert re.fullmatch(r".+@sha256:[0-9a-f]{64}", container["image"])
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert sorted(mount["name"] for mount in container["volumeMounts"]) == sorted(volumes)
        requests = container["resources"]["requests"]
        limits = container["resources"]["limits"]
        assert limits.items() <= requests.items()
        sizes = [entry["emptyDir"] for entry in volumes.values() if "emptyDir" in entry]
        disk = sum(quantity(entry["sizeLimit"]) for entry in sizes if "medium" not in entry)
        assert disk <= quantity(requests["ephemeral-storage"])
        assert sum(quantity(entry["sizeLimit"]) for entry in sizes if "medium" in entry) < quantity(
            limits["memory"]
        )
        ports = container.get("ports", [])
        assert all(
            len({port[key] for port in ports}) == len(ports) for key in ("name", "containerPort")
        )
    if "Deployment" not in objects:
        rules = job["podFailurePolicy"]["rules"]
        actions = {
            rule["onExitCodes"]["values"][0]: rule["action"]
            for rule in rules
            if "onExitCodes" in rule
        }
        assert actions == {MISTAKE: "FailJob", RESTART: "Ignore"}


def lets_out(policy: dict[str, Any], address: str) -> bool:
    """Whether a pod may connect to port 443 of an address."""
    for rule in policy["egress"]:
        if {"protocol": "TCP", "port": 443} in rule.get("ports", ()):
            for block in (peer["ipBlock"] for peer in rule["to"]):
                whole, *exceptions = (
                    ip_address(address) in ip_network(item)
                    for item in (block["cidr"], *block["except"])
                )
                if whole and not any(exceptions):
                    return True
    return False


@pytest.mark.parametrize(
    "folder", [*(f"overlays/{one}" for one in OVERLAYS), *(f"tasks/{one}" for one in TASKS)]
)
def test_what_is_built_is_valid_and_its_pods_are_locked_down(folder):
    objects = objects_in(folder)
    check_schemas(objects)
    check_pods(objects)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_hosts_meet_ranks_are_scraped_and_the_recipe_fits_its_pods(overlay):
    objects = objects_in(f"overlays/{overlay}")
    job = job_of(objects)
    pod = job["template"]["spec"]
    labels = job["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    name = labels["app.kubernetes.io/instance"]
    variables = variables_of(container, labels)
    first = f"{name}-0.{pod.get('subdomain')}"
    port = str(
        next(
            (entry["containerPort"] for entry in container["ports"] if entry["name"] == "meeting"),
            "",
        )
    )
    if "Job" not in objects:
        first = f"{name}-node-0-0.{name}"
        spec = (objects.get("JobSet") or objects["TrainingRuntime"]["spec"]["template"])["spec"]
        assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
        assert "Service" not in objects and "subdomain" not in pod
    else:
        service = objects["Service"]["spec"]
        assert (
            service["clusterIP"] == "None"
            and service["publishNotReadyAddresses"]
            and pod["subdomain"] == name
        )
    if "TrainJob" in objects:
        # The operator sets these, refuses them in `env`, and wants the runtime to be there first.
        injected = {
            "PET_NNODES",
            "PET_NPROC_PER_NODE",
            "PET_NODE_RANK",
            "PET_MASTER_ADDR",
            "PET_MASTER_PORT",
        }
        assert not injected & set(variables) and not port
        assert list(objects).index("TrainingRuntime") < list(objects).index("TrainJob")
        train_job = objects["TrainJob"]["spec"]
        assert (train_job["runtimeRef"]["kind"], train_job["runtimeRef"]["name"]) == (
            "TrainingRuntime",
            name,
        )
        hosts = train_job["trainer"]["numNodes"]
        ranks = train_job["trainer"]["numProcPerNode"]
        port = OPERATORS_PORT
        variables |= {"PET_MASTER_ADDR": first, "PET_MASTER_PORT": port}
    else:
        hosts = int(variables["PET_NNODES"])
        ranks = int(variables["PET_NPROC_PER_NODE"])
        assert job["completions"] == job["parallelism"] == hosts
    launch = get_args_parser().parse_args(
        [expanded(argument, variables) for argument in container["args"]]
    )
    assert (variables["PET_MASTER_ADDR"], variables["PET_MASTER_PORT"]) == (first, port)
    assert variables["PET_RDZV_ID"] == name
    assert (hosts, ranks) == ((1, 2) if overlay == "cpu" else (2, 8))
    assert int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) == (
        0 if overlay == "cpu" else ranks
    )
    assert int(variables["OMP_NUM_THREADS"]) * ranks <= int(
        container["resources"]["requests"]["cpu"]
    )

    mounts = {entry["mountPath"]: entry for entry in container["volumeMounts"]}
    volumes = {entry["name"]: entry for entry in pod["volumes"]}
    config = objects["ConfigMap"]
    volume = volumes[mounts["/etc/distap"]["name"]]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert launch.training_script == "/etc/distap/recipe.yaml" and list(config["data"]) == [
        "recipe.yaml"
    ]
    recipe = load_recipe(
        K8S / "overlays" / overlay / "training/recipe.yaml", launch.training_script_args
    )
    assert str(recipe.run) == f"/runs/{name}" and str(recipe.data.pixels.spool_folder) == "/spool"
    assert not any(mounts[path].get("readOnly") for path in ("/runs", "/spool", "/tmp", "/dev/shm"))
    assert (
        "/data" in mounts if recipe.data.train.startswith("/data/") else "://" in recipe.data.train
    )
    assert ("persistentVolumeClaim" in volumes["runs"]) == (recipe.checkpoint.store is None)
    share = math.ceil(recipe.sampling.size / (hosts * ranks)) * 3 * recipe.data.image_size**2
    assert ranks * share < quantity(volumes["spool"]["emptyDir"]["sizeLimit"])

    metrics = {
        entry["name"]: entry["containerPort"]
        for entry in container["ports"]
        if entry["name"].startswith("metrics-")
    }
    assert metrics == {f"metrics-{rank}": recipe.metrics.port + rank for rank in range(ranks)}
    assert recipe.metrics.address == "0.0.0.0"
    assert set(metrics) <= {endpoint["port"] for endpoint in MONITOR["podMetricsEndpoints"]}
    (opened,) = objects["NetworkPolicy"]["spec"]["ingress"][1]["ports"]
    assert all(opened["port"] <= entry <= opened["endPort"] for entry in metrics.values())
    for probe in (container["startupProbe"], container["livenessProbe"]):
        assert probe["periodSeconds"] * probe["failureThreshold"] > 3 * recipe.timeout_seconds
    grace = recipe.stop.grace_seconds
    assert grace + MARGIN_SECONDS + 10 <= pod["terminationGracePeriodSeconds"] <= grace + 60


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_hosts_get_the_secret_of_the_ranks_if_there_is_one(overlay):
    (container,) = job_of(objects_in(f"overlays/{overlay}"))["template"]["spec"]["containers"]
    [secret] = [entry["valueFrom"] for entry in container["env"] if entry["name"] == SECRET]
    assert secret == {"secretKeyRef": {"name": "distap-secret", "key": SECRET, "optional": True}}


@pytest.mark.parametrize("task", TASKS)
def test_the_commands_of_a_task_are_those_of_distap(task):
    objects = objects_in(f"tasks/{task}")
    template = job_of(objects)["template"]
    pod = template["spec"]
    labels = template["metadata"]["labels"]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert container["command"] == ["tini", "--", "distap"]
        name, *arguments = (
            expanded(word, variables_of(container, labels)) for word in container["args"]
        )
        options = typer.main.get_command(app).commands[name].make_context(name, arguments).params
    if task == "serve":
        (port,) = container["ports"]
        assert (port["name"], port["containerPort"]) == ("http", options["port"])
        assert (
            objects["Service"]["spec"]["ports"][0]["targetPort"]
            == MONITOR["podMetricsEndpoints"][-1]["port"]
        )
        assert objects["NetworkPolicy"]["spec"]["ingress"][1]["ports"] == [
            {"protocol": "TCP", "port": options["port"]}
        ]
        (_, drained) = container["lifecycle"]["preStop"]["exec"]["command"]
        wait = int(drained) + 2 * options["timeout_seconds"]
        assert (
            pod["terminationGracePeriodSeconds"] > wait
            and "search.research.svc" in options["allowed_host"]
        )


@pytest.mark.parametrize("task", ["evaluate", "extract"])
def test_a_task_can_wait_in_the_queue_too(tmp_path, task):
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / f"k8s/tasks/{task}/kustomization.yaml"
    file.write_text(file.read_text() + "components: [../../components/kueue]\n")
    objects = objects_in(str(file.parent))
    check_schemas(objects)
    labels = objects["Job"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "training"
    [queue] = [
        entry
        for entry in yaml.safe_load_all(built("cluster/kueue"))
        if "resourceGroups" in str(entry)
    ]
    covered = queue["spec"]["resourceGroups"][0]["coveredResources"]
    pod = objects["Job"]["spec"]["template"]["spec"]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert container["resources"]["requests"].keys() <= {*covered}


def test_the_claims_are_valid_and_those_that_pods_mount():
    claims = list(yaml.safe_load_all(built("storage")))
    for claim in claims:
        kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    for folder in [
        *(f"overlays/{item}" for item in OVERLAYS),
        *(f"tasks/{item}" for item in TASKS),
    ]:
        mounted = set(re.findall(r"claimName: (\S+)", built(folder)))
        assert mounted <= {claim["metadata"]["name"] for claim in claims}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_another_name_and_other_counts_are_edits_of_single_lines(tmp_path, overlay):
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s/overlays" / overlay / "training/kustomization.yaml"
    text = re.sub(r"(instance: )[\w-]+", r"\1mine", file.read_text())
    file.write_text(re.sub(r'(PET_NNODES, value: )"\d+"', r'\1"4"', text))
    objects = objects_in(str(file.parents[1]))
    check_schemas(objects)
    check_pods(objects)
    assert objects["NetworkPolicy"]["metadata"]["name"] == "mine"
    assert objects["ConfigMap"]["metadata"]["name"].startswith("mine-")
    trainer = objects.get("TrainJob", {}).get("spec", {}).get("trainer", {})
    assert (trainer.get("numNodes") or job_of(objects)["completions"]) == 4


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_deleting_a_training_takes_nothing_from_others(overlay):
    for kind, entry in objects_in(f"overlays/{overlay}").items():
        assert kind in NAMESPACED
        assert entry["metadata"]["namespace"] == "research"


def test_the_queue_covers_all_that_a_training_requests():
    objects = [*yaml.safe_load_all(built("cluster/kueue"))]
    names = {(entry["kind"], entry["metadata"]["name"]) for entry in objects}
    training = objects_in("overlays/kueue")
    labels = training["JobSet"]["metadata"]["labels"]
    assert ("LocalQueue", labels["kueue.x-k8s.io/queue-name"]) in names
    assert ("WorkloadPriorityClass", labels["kueue.x-k8s.io/priority-class"]) in names
    [queue] = [entry for entry in objects if entry["kind"] == "ClusterQueue"]
    [group] = queue["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    assert ("ResourceFlavor", flavor["name"]) in names
    assert [entry["name"] for entry in flavor["resources"]] == group["coveredResources"]
    template = job_of(training)["template"]
    requests = template["spec"]["containers"][0]["resources"]["requests"]
    assert requests.keys() <= {*group["coveredResources"]}
    # A queue without a topology admits no training that asks for one.
    assert not any("topology" in name for name in template["metadata"]["annotations"])


@pytest.mark.parametrize("folder", ["cluster/kueue", "cluster/kueue-topology"])
def test_kueue_knows_every_field_of_its_queues(folder):
    schemas = yaml.safe_load((Path(__file__).parent / "kueue_schemas.yaml").read_text())
    objects = [*yaml.safe_load_all(built(folder))]
    for entry in objects:
        jsonschema.validate(entry, schemas[entry["kind"]])
        assert ("namespace" in entry["metadata"]) == (entry["kind"] == "LocalQueue")
    topologies = {entry["metadata"]["name"] for entry in objects if entry["kind"] == "Topology"}
    [flavor] = [entry for entry in objects if entry["kind"] == "ResourceFlavor"]
    assert {flavor["spec"].get("topologyName")} - {None} == topologies
    flavor["spec"]["nodeLabel"] = {}
    with pytest.raises(jsonschema.ValidationError, match="nodeLabel"):
        jsonschema.validate(flavor, schemas["ResourceFlavor"])


def test_the_topology_has_the_level_that_the_component_asks_for():
    [topology] = [
        entry
        for entry in yaml.safe_load_all(built("cluster/kueue-topology"))
        if entry["kind"] == "Topology"
    ]
    component = yaml.safe_load((K8S / "components/kueue-topology/kustomization.yaml").read_text())
    job = yaml.safe_load(component["patches"][0]["patch"])
    [asked] = job["spec"]["template"]["metadata"]["annotations"].values()
    assert asked in [level["nodeLabel"] for level in topology["spec"]["levels"]]


def test_components_for_other_clusters_fit_an_overlay(tmp_path):
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s/overlays/kueue/kustomization.yaml"
    text = file.read_text().replace(
        "- training\n",
        "- ../../components/kueue-topology\n- ../../components/priority\n- training\n"
        "- ../../components/cpu-limit\n",
    )
    file.write_text(text)
    objects = objects_in(str(file.parent))
    check_schemas(objects)
    check_pods(objects)
    template = job_of(objects)["template"]
    [priority] = yaml.safe_load_all(built("cluster/priority"))
    kubernetes_validate.validate(priority, KUBERNETES, strict=True)
    assert template["spec"]["priorityClassName"] == priority["metadata"]["name"]
    assert "kueue.x-k8s.io/podset-preferred-topology" in template["metadata"]["annotations"]
    resources = template["spec"]["containers"][0]["resources"]
    assert resources["limits"]["cpu"] == resources["requests"]["cpu"] == "48"


def test_the_schemas_notice_an_unknown_field_in_a_core_object_and_in_an_operators():
    for folder, kind in (("overlays/cpu", "Job"), ("overlays/jobset", "JobSet")):
        objects = objects_in(folder)
        objects[kind]["spec"]["paralelism"] = 2
        with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
            check_schemas(objects)
