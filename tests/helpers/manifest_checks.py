"""What must hold of every training's manifests; each check takes one apart and asserts."""

import math
import signal
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import kubernetes_validate
import yaml
from admission_checks import the_api_server_takes_it
from built_manifests import K8S
from kubeflow_trainer_api import models
from manifest_parts import OPERATORS_PORT, RUNTIMES, Parts
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from distap.apps.k8s.request import quantity_bytes
from distap.errors import FAILED, FINISHED, MISTAKE, RESTART
from distap.processes.stopping import MARGIN_SECONDS, SIGNALS

KUBERNETES = "1.37"
OPERATOR_MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
API_VERSIONS = {"JobSet": "jobset.x-k8s.io/v1alpha2"} | dict.fromkeys(
    ("TrainJob", *RUNTIMES), "trainer.kubeflow.org/v1alpha1"
)
# At these, clouds hand out the credentials of a machine: AWS, GCP, Azure (two), Alibaba, Oracle, ECS, EKS; IPv6.
METADATA = ["169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "169.254.170.2", "169.254.170.23"]
METADATA += ["fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fe80::a9fe:a9fe"]
# DNS: a Service, NodeLocal DNSCache, the server of Google's and Amazon's networks, an OpenShift pod, IPv6.
NAME_SERVERS = ["10.96.0.10", "169.254.20.10", "169.254.169.254", "169.254.169.253", "10.128.0.5", "fd00::a"]
OUTSIDE = ["52.216.0.1", "2600:1fa0::1"]  # of an object store
Check = Callable[[Parts], None]


def core_objects_are_valid(parts: Parts) -> None:
    """Against Kubernetes' own schemas, strictly; also the Job inside of what operators make one of."""
    for one in parts.objects:
        if one["kind"] not in OPERATOR_MODELS:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": parts.job}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


def operator_objects_are_valid(parts: Parts) -> None:
    """Against the operators' models; these drop what they do not know, so nothing may be lost on the way."""
    for one in parts.objects:
        model = OPERATOR_MODELS.get(one["kind"])
        if model is not None:
            assert one["apiVersion"] == API_VERSIONS[one["kind"]]
            lost = sorted(set(leaves(one)) - set(leaves(model.from_dict(one).to_dict())))
            assert not lost, f"unknown to {model.__name__}: {lost}"


def selectors_select_the_pods(parts: Parts) -> None:
    policy = parts.one("NetworkPolicy")["spec"]
    monitor = _monitor()
    affinity = parts.pod["affinity"]
    terms = [
        *affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"],
        *(
            preferred["podAffinityTerm"]
            for preferred in affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        ),
    ]
    selectors = [policy["podSelector"], monitor["selector"], *(term["labelSelector"] for term in terms)]
    selectors += [peer["podSelector"] for peer in _peers(policy) if "podSelector" in peer]
    selectors += [{"matchLabels": one["spec"]["selector"]} for one in parts.objects if one["kind"] == "Service"]
    for selector in selectors:
        assert selector["matchLabels"].items() <= parts.labels.items(), f"{selector} does not select {parts.labels}"
    for term in terms:
        assert set(term["matchLabelKeys"]) <= set(parts.labels)
    assert parts.labels[monitor["jobLabel"]] == parts.name
    assert "app.kubernetes.io/instance" in policy["podSelector"]["matchLabels"], "other trainings' pods"


def one_pod_a_host_close_together(parts: Parts) -> None:
    affinity = parts.pod["affinity"]
    (apart,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (near,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert near["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    (node,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (expression,) = node["preference"]["matchExpressions"]
    assert expression["operator"] == ("Exists" if _gpus(parts) else "DoesNotExist")
    tolerated = [toleration["key"] for toleration in parts.pod.get("tolerations", [])]
    assert tolerated == (["nvidia.com/gpu"] if _gpus(parts) else [])


def pods_have_names(parts: Parts) -> None:
    """Each pod's own, before it is ready, from one headless Service."""
    if parts.job_set is not None:
        network = parts.job_set["network"]
        assert network["enableDNSHostnames"] and network["publishNotReadyAddresses"]
        assert not [one for one in parts.objects if one["kind"] == "Service"], "JobSet makes its own"
    else:
        service = parts.one("Service")
        assert service["metadata"]["name"] == parts.pod["subdomain"]
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert parts.job["completionMode"] == "Indexed"
    longest = f"{parts.first_host.partition('.')[0]}{parts.hosts - 1}-abcde"
    assert len(longest) <= 63


def hosts_meet(parts: Parts) -> None:
    """By torchrun's own parser: as many as there are, at the first."""
    launch = parts.launch
    port = OPERATORS_PORT if parts.is_train_job else str(parts.ports["rendezvous"])
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", f"{parts.first_host}:{port}")
    assert ("rendezvous" in parts.ports) != parts.is_train_job
    assert launch.rdzv_id == parts.name
    assert int(launch.nnodes) == parts.hosts
    assert launch.max_restarts > 0
    if not parts.is_train_job:
        assert parts.job["parallelism"] == parts.job["completions"]


def ranks_have_ports_and_devices(parts: Parts) -> None:
    ranks = int(parts.launch.nproc_per_node)
    recipe = parts.recipe
    assert recipe.metrics.address == "0.0.0.0"
    assert parts.metrics_ports == {f"metrics-{rank}": recipe.metrics.port_of(rank) for rank in range(ranks)}
    assert _gpus(parts) in (0, ranks)
    assert {endpoint["port"] for endpoint in _monitor()["podMetricsEndpoints"]} >= set(parts.metrics_ports)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert parts.container[probe]["httpGet"]["port"] in parts.metrics_ports
    opened = parts.one("NetworkPolicy")["spec"]["ingress"][1]["ports"][0]
    for port in parts.metrics_ports.values():
        assert opened["port"] <= port <= opened["endPort"]


def probes_wait_for_hosts_that_meet(parts: Parts) -> None:
    """No rank answers while hosts wait for each other, at first and after each fault."""
    join_timeout = int(_parse_rendezvous_config(parts.launch.rdzv_conf)["join_timeout"])
    for probe in ("startupProbe", "livenessProbe"):
        settings = parts.container[probe]
        assert settings["httpGet"]["path"] == "/healthz"
        assert settings["periodSeconds"] * settings["failureThreshold"] > join_timeout
    assert parts.container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def volumes_are_mounted(parts: Parts) -> None:
    mounted = [mount["name"] for mount in parts.container["volumeMounts"]]
    declared = [volume["name"] for volume in parts.pod["volumes"]]
    assert sorted(mounted) == sorted(declared)
    config = parts.mounts[str(parts.recipe_file.parent)]
    assert config["configMap"]["name"] == parts.one("ConfigMap")["metadata"]["name"]
    assert config["readOnly"]
    assert parts.recipe_file.name in parts.one("ConfigMap")["data"]
    for path, volume in parts.mounts.items():
        if "emptyDir" in volume:
            assert quantity_bytes(volume["emptyDir"]["sizeLimit"], path) > 0


def what_the_program_writes_to_is_writable(parts: Parts) -> None:
    recipe = parts.recipe
    paths = [str(recipe.run), "/tmp/any", "/dev/shm/any", f"{parts.environment['HOME']}/any"]
    paths += [f"{recipe.data.pixels.spool_folder}/any"] + (
        [str(recipe.data.cache.folder)] if recipe.data.cache else []
    )
    for path in paths:
        mount = _mount(parts, path)
        assert mount is not None and not mount["readOnly"], f"{path} is on the read-only root, or a read-only mount"
    memory = _mount(parts, "/dev/shm/any")
    assert memory is not None and memory["emptyDir"]["medium"] == "Memory"
    for source in filter(None, (recipe.data.train, recipe.data.validation)):
        assert "://" in source or _mount(parts, source) is not None, f"{source} is nowhere"
    # Every pod reads every checkpoint: a claim, or a store.
    shared = "persistentVolumeClaim" in (_mount(parts, str(recipe.run)) or {})
    assert shared or recipe.checkpoint.store, f"{recipe.run} is each pod's own"


def grace_fits(parts: Parts) -> None:
    """The ranks' grace, within the launcher's, within the pod's."""
    grace = parts.recipe.stop.grace_seconds
    assert grace + MARGIN_SECONDS + 10 <= parts.pod["terminationGracePeriodSeconds"] <= grace + 60


def the_signal_reaches_the_ranks(parts: Parts) -> None:
    """The kubelet's SIGTERM, by way of the launcher, which gives the ranks the time that the recipe says."""
    assert signal.SIGTERM in SIGNALS
    assert "SIGTERM" in parts.launch.signals_to_handle.split(",")
    assert parts.launch.shutdown_timeout is None, "the launcher computes it from the recipe"
    assert "lifecycle" not in parts.container, "a hook takes from the grace time; another signal means something else"


def exit_codes_are_read(parts: Parts) -> None:
    rules = parts.job["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"]
        for rule in reversed(rules)
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert actions == {MISTAKE: "FailJob", RESTART: "Ignore"}
    assert FAILED not in actions and FINISHED not in actions
    for rule in rules:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["operator"] == "In"
            assert rule["onExitCodes"]["containerName"] == parts.container["name"]
    conditions = [(rule["action"], rule["onPodConditions"]) for rule in rules if "onPodConditions" in rule]
    assert conditions == [("Ignore", [{"type": "DisruptionTarget", "status": "True"}])]
    assert parts.pod["restartPolicy"] == "Never"
    assert parts.job["podReplacementPolicy"] == "Failed"
    assert "activeDeadlineSeconds" not in parts.job
    if parts.job_set is None:
        assert parts.job["backoffLimitPerIndex"] > 0 and parts.job["maxFailedIndexes"] == 0
        return
    # JobSet starts all again as soon as one pod has failed for good, but not after a mistake.
    assert parts.job["backoffLimit"] == 0 and "backoffLimitPerIndex" not in parts.job
    policy = parts.job_set["failurePolicy"]
    assert policy["restartStrategy"] == "BlockingRecreate" and policy["maxRestarts"] >= 0
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def pods_may_do_little(parts: Parts) -> None:
    pod, container = parts.pod["securityContext"], parts.container["securityContext"]
    assert pod["runAsNonRoot"] and pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 10001
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert parts.pod["automountServiceAccountToken"] is False
    assert parts.pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(parts.pod)
    assert "command" not in parts.container, "the image's entry point passes signals on"
    assert not [one for one in parts.objects if one["kind"] == "Secret"]
    (source,) = parts.container["envFrom"]
    assert source["secretRef"]["optional"] is True


def others_leave_the_pods_alone(parts: Parts) -> None:
    """Neither an autoscaler that wants the node empty, nor a mesh that adds a container."""
    expected = {
        "karpenter.sh/do-not-disrupt": "true",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "sidecar.istio.io/inject": "false",
    }
    assert expected.items() <= parts.template["metadata"]["annotations"].items()


def resources_add_up(parts: Parts) -> None:
    requests, limits = parts.container["resources"]["requests"], parts.container["resources"]["limits"]
    assert requests["memory"] == limits["memory"]
    assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
    ranks = int(parts.launch.nproc_per_node)
    assert 1 <= int(parts.environment["OMP_NUM_THREADS"]) * ranks <= int(requests["cpu"])
    folders = [volume["emptyDir"] for volume in parts.pod["volumes"] if "emptyDir" in volume]
    disk = sum(quantity_bytes(one["sizeLimit"], "") for one in folders if "medium" not in one)
    memory = sum(quantity_bytes(one["sizeLimit"], "") for one in folders if "medium" in one)
    assert disk <= quantity_bytes(requests["ephemeral-storage"], "")
    assert memory < quantity_bytes(limits["memory"], "")
    recipe = parts.recipe
    share = math.ceil(recipe.sampling.size / (ranks * parts.hosts)) * 3 * recipe.data.image_size**2
    if recipe.data.pixels.way(share) == "memory":
        assert memory + ranks * share < quantity_bytes(limits["memory"], "")
    else:
        assert ranks * share < quantity_bytes(parts.mounts["/spool"]["emptyDir"]["sizeLimit"], "")


def the_network_is_closed(parts: Parts) -> None:
    policy = parts.one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    for address in METADATA:
        assert not lets_out(policy, address, 443) and not lets_out(policy, address, 80), address
    for address in OUTSIDE:
        assert lets_out(policy, address, 443) and not lets_out(policy, address, 80), address
    among, scraping = policy["ingress"]
    assert "ports" not in among and set(among["from"][0]) == {"podSelector"}
    assert set(scraping["from"][0]) == {"namespaceSelector"}
    for address in NAME_SERVERS:
        for protocol in ("UDP", "TCP"):
            assert lets_out(policy, address, 53, protocol), f"{address} {protocol}"
    assert not lets_out(policy, OUTSIDE[0], 443, "UDP")


def runtimes_are_what_the_operator_expects(parts: Parts) -> None:
    if not parts.is_train_job:
        return
    reference = parts.outer["spec"]["runtimeRef"]
    runtime = parts.one(reference["kind"])
    assert reference["kind"] in RUNTIMES
    assert (reference["apiGroup"], reference["name"]) == ("trainer.kubeflow.org", runtime["metadata"]["name"])
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == parts.container["name"] == "node"
    step = replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert step == "trainer"
    injected = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    assert not injected & {entry["name"] for entry in parts.container["env"]}
    assert "env" not in parts.outer["spec"]["trainer"]
    assert parts.objects.index(runtime) < parts.objects.index(parts.outer), "refused before there is a runtime"


CHECKS: list[Check] = [
    core_objects_are_valid,
    the_api_server_takes_it,
    operator_objects_are_valid,
    selectors_select_the_pods,
    one_pod_a_host_close_together,
    pods_have_names,
    hosts_meet,
    ranks_have_ports_and_devices,
    probes_wait_for_hosts_that_meet,
    volumes_are_mounted,
    what_the_program_writes_to_is_writable,
    grace_fits,
    the_signal_reaches_the_ranks,
    exit_codes_are_read,
    pods_may_do_little,
    others_leave_the_pods_alone,
    resources_add_up,
    the_network_is_closed,
    runtimes_are_what_the_operator_expects,
]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every value in a tree with its path; empty branches too."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not entries:
        yield path, repr(value)
    for key, inner in entries:
        yield from leaves(inner, f"{path}.{key}")


def _monitor() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((K8S / "monitoring" / "podmonitor.yaml").read_text())["spec"]
    return spec


def _gpus(parts: Parts) -> int:
    return int(parts.container["resources"]["limits"].get("nvidia.com/gpu", 0))


def _peers(policy: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rule in policy["ingress"]:
        yield from rule["from"]
    for rule in policy["egress"]:
        yield from rule.get("to", [])


def _mount(parts: Parts, path: str) -> dict[str, Any] | None:
    """The volume that a path is on; none on the root."""
    below = [place for place in parts.mounts if path == place or path.startswith(f"{place}/")]
    return parts.mounts[max(below, key=len)] if below else None


def lets_out(policy: dict[str, Any], address: str, port: int, protocol: str = "TCP") -> bool:
    """Whether a pod may connect there, wherever that is."""
    for rule in policy["egress"]:
        if "ports" in rule and {"protocol": protocol, "port": port} not in rule["ports"]:
            continue
        if "to" not in rule:
            return True
        for block in (peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer):
            inside = [ip_address(address) in ip_network(cidr) for cidr in (block["cidr"], *block.get("except", []))]
            if inside[0] and not any(inside[1:]):
                return True
    return False
