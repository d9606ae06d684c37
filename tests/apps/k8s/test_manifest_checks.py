"""Each check finds the mistake that it is for, in manifests that were right before."""

from collections.abc import Callable
from typing import Any

import manifest_checks as checks
import pytest
from admission_checks import the_api_server_takes_it
from built_manifests import needs_kubectl, objects_of
from kubernetes_validate import ValidationError
from manifest_checks import CHECKS
from manifest_parts import Parts, parts_of
from pydantic import ValidationError as ModelError

from distap.errors import DistapError

JOB, JOB_SET, TRAIN_JOB = "indexed-job gpu claims", "jobset cpu object store", "trainjob gpu claims"
FOUND = (AssertionError, KeyError, ValidationError, ModelError, DistapError)
Breaking = Callable[[Parts], Any]


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    """What sets a value in a tree."""

    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


def of_pod(value: Any, *path: Any) -> Breaking:
    return lambda parts: put(value, *path)(parts.pod)


def of_container(value: Any, *path: Any) -> Breaking:
    return lambda parts: put(value, *path)(parts.container)


def of_job(value: Any, *path: Any) -> Breaking:
    return lambda parts: put(value, *path)(parts.job)


def of_one(kind: str, value: Any, *path: Any) -> Breaking:
    return lambda parts: put(value, *path)(parts.one(kind))


def argument(old: str, new: str) -> Breaking:
    def change(parts: Parts) -> None:
        arguments = parts.container["args"]
        assert any(old in one for one in arguments)
        parts.container["args"] = [one.replace(old, new) for one in arguments]

    return change


def variable(name: str, value: str) -> Breaking:
    def change(parts: Parts) -> None:
        (entry,) = [entry for entry in parts.container["env"] if entry["name"] == name]
        entry["value"] = value

    return change


def volume(name: str, value: dict[str, Any]) -> Breaking:
    def change(parts: Parts) -> None:
        parts.pod["volumes"] = [
            {"name": name, **value} if one["name"] == name else one for one in parts.pod["volumes"]
        ]

    return change


def without_mount(path: str) -> Breaking:
    def change(parts: Parts) -> None:
        mounts = parts.container["volumeMounts"]
        parts.container["volumeMounts"] = [mount for mount in mounts if mount["mountPath"] != path]

    return change


APART = ("affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution", 0)
BROKEN: list[tuple[checks.Check, str, Breaking]] = [
    (checks.core_objects_are_valid, JOB, of_pod(1, "terminationGraceSeconds")),
    (checks.core_objects_are_valid, JOB_SET, of_container("0.5", "resources", "limit")),
    (checks.core_objects_are_valid, TRAIN_JOB, of_job("Indexed", "completion_mode")),
    (the_api_server_takes_it, JOB, of_container("metrics-of-rank-0", "ports", 1, "name")),
    (the_api_server_takes_it, JOB_SET, of_container(29400, "ports", 1, "containerPort")),
    (the_api_server_takes_it, TRAIN_JOB, of_pod(["app.kubernetes.io/name"], *APART, "matchLabelKeys")),
    (the_api_server_takes_it, JOB, of_job([75, 2], "podFailurePolicy", "rules", 0, "onExitCodes", "values")),
    (
        the_api_server_takes_it,
        JOB,
        of_one("NetworkPolicy", ["fe80::/10"], "spec", "egress", 2, "to", 0, "ipBlock", "except"),
    ),
    (the_api_server_takes_it, JOB, of_one("ConfigMap", "a" * 2**20, "data", "recipe.yaml")),
    (checks.operator_objects_are_valid, JOB_SET, of_one("JobSet", True, "spec", "network", "publishNotReady")),
    (checks.operator_objects_are_valid, JOB_SET, of_one("JobSet", "ten", "spec", "failurePolicy", "maxRestarts")),
    (checks.operator_objects_are_valid, TRAIN_JOB, of_one("TrainJob", {}, "spec", "podTemplateOverrides")),
    (checks.operator_objects_are_valid, TRAIN_JOB, of_one("TrainJob", "trainer.kubeflow.org/v2", "apiVersion")),
    (
        checks.operator_objects_are_valid,
        TRAIN_JOB,
        of_one("TrainingRuntime", 8, "spec", "mlPolicy", "torch", "ranks"),
    ),
    (checks.selectors_select_the_pods, JOB, of_one("Service", "other", "spec", "selector", "app.kubernetes.io/name")),
    (checks.selectors_select_the_pods, JOB, of_pod({"matchLabels": {"app": "distap"}}, *APART, "labelSelector")),
    (
        checks.selectors_select_the_pods,
        JOB_SET,
        of_job("other", "template", "metadata", "labels", "app.kubernetes.io/instance"),
    ),
    (checks.one_pod_a_host_close_together, JOB, of_pod("topology.kubernetes.io/zone", *APART, "topologyKey")),
    (checks.one_pod_a_host_close_together, JOB, of_pod([], "tolerations")),
    (checks.pods_have_names, JOB, of_pod("another", "subdomain")),
    (checks.pods_have_names, JOB, of_one("Service", False, "spec", "publishNotReadyAddresses")),
    (
        checks.pods_have_names,
        JOB_SET,
        of_one("JobSet", False, "spec", "network", "publishNotReadyAddresses"),
    ),
    (checks.hosts_meet, JOB, variable("PET_RDZV_ENDPOINT", "emoji-1.emoji:29400")),
    (checks.hosts_meet, JOB, variable("PET_NNODES", "3")),
    (checks.hosts_meet, JOB_SET, variable("PET_RDZV_ENDPOINT", "emoji-0.emoji:29400")),
    (checks.hosts_meet, JOB_SET, lambda parts: parts.container["env"].reverse()),
    (checks.hosts_meet, TRAIN_JOB, argument("$(PET_MASTER_PORT)", "29400")),
    (checks.ranks_have_ports_and_devices, JOB, variable("PET_NPROC_PER_NODE", "5")),
    (checks.ranks_have_ports_and_devices, JOB, argument("metrics.port=9400", "metrics.port=9500")),
    (checks.ranks_have_ports_and_devices, JOB, argument("address=0.0.0.0", "address=127.0.0.1")),
    (checks.ranks_have_ports_and_devices, JOB, of_container("http", "livenessProbe", "httpGet", "port")),
    (
        checks.ranks_have_ports_and_devices,
        JOB_SET,
        of_one("NetworkPolicy", 9401, "spec", "ingress", 1, "ports", 0, "endPort"),
    ),
    (
        checks.ranks_have_ports_and_devices,
        TRAIN_JOB,
        of_one("TrainJob", 8, "spec", "trainer", "numProcPerNode"),
    ),
    (checks.probes_wait_for_hosts_that_meet, JOB, argument("join_timeout=1800", "join_timeout=3600")),
    (checks.probes_wait_for_hosts_that_meet, JOB, of_container(3, "livenessProbe", "failureThreshold")),
    (checks.volumes_are_mounted, JOB, without_mount("/spool")),
    (checks.volumes_are_mounted, JOB, volume("recipe", {"configMap": {"name": "emoji-recipe"}})),
    (checks.volumes_are_mounted, JOB, argument("/etc/distap/recipe.yaml", "/etc/distap/config.yaml")),
    (checks.volumes_are_mounted, JOB, volume("spool", {"emptyDir": {}})),
    (checks.what_the_program_writes_to_is_writable, JOB, argument("run=/runs", "run=/checkpoints")),
    (checks.what_the_program_writes_to_is_writable, JOB, argument("spool_folder=/spool", "spool_folder=/data")),
    (checks.what_the_program_writes_to_is_writable, JOB, variable("HOME", "/home/distap")),
    (checks.what_the_program_writes_to_is_writable, JOB, without_mount("/data")),
    (checks.what_the_program_writes_to_is_writable, JOB, volume("runs", {"emptyDir": {"sizeLimit": "1Gi"}})),
    (checks.what_the_program_writes_to_is_writable, JOB, volume("shm", {"emptyDir": {"medium": ""}})),
    (checks.grace_fits, JOB, of_pod(220, "terminationGracePeriodSeconds")),
    (checks.grace_fits, JOB_SET, of_pod(3600, "terminationGracePeriodSeconds")),
    (checks.the_signal_reaches_the_ranks, JOB, of_container({"stopSignal": "SIGQUIT"}, "lifecycle")),
    (checks.the_signal_reaches_the_ranks, JOB, argument("--max-restarts=3", "--signals-to-handle=SIGINT")),
    (checks.the_signal_reaches_the_ranks, JOB_SET, argument("--max-restarts=3", "--shutdown-timeout=30")),
    (checks.exit_codes_are_read, JOB, of_job([3], "podFailurePolicy", "rules", 0, "onExitCodes", "values")),
    (checks.exit_codes_are_read, JOB, of_job("Count", "podFailurePolicy", "rules", 1, "action")),
    (
        checks.exit_codes_are_read,
        JOB,
        of_job("trainer", "podFailurePolicy", "rules", 0, "onExitCodes", "containerName"),
    ),
    (checks.exit_codes_are_read, JOB, of_job("TerminatingOrFailed", "podReplacementPolicy")),
    (checks.exit_codes_are_read, JOB_SET, of_job(6, "backoffLimit")),
    (checks.exit_codes_are_read, JOB_SET, of_one("JobSet", "Recreate", "spec", "failurePolicy", "restartStrategy")),
    (checks.pods_may_do_little, JOB, of_pod(0, "securityContext", "runAsUser")),
    (checks.pods_may_do_little, JOB, of_container(False, "securityContext", "readOnlyRootFilesystem")),
    (checks.pods_may_do_little, JOB, of_pod(True, "automountServiceAccountToken")),
    (checks.pods_may_do_little, JOB, of_container(["python"], "command")),
    (
        checks.others_leave_the_pods_alone,
        TRAIN_JOB,
        of_job("true", "template", "metadata", "annotations", "sidecar.istio.io/inject"),
    ),
    (checks.resources_add_up, JOB, variable("OMP_NUM_THREADS", "16")),
    (checks.resources_add_up, JOB, of_container("1Gi", "resources", "requests", "ephemeral-storage")),
    (checks.resources_add_up, JOB_SET, of_container("1Gi", "resources", "limits", "memory")),
    (
        checks.the_network_is_closed,
        JOB,
        of_one("NetworkPolicy", [], "spec", "egress", 2, "to", 0, "ipBlock", "except"),
    ),
    (
        checks.the_network_is_closed,
        JOB,
        of_one("NetworkPolicy", "fe80::/10", "spec", "egress", 2, "to", 1, "ipBlock", "cidr"),
    ),
    (checks.the_network_is_closed, JOB, of_one("NetworkPolicy", ["Ingress"], "spec", "policyTypes")),
    (
        checks.the_network_is_closed,
        JOB,
        of_one("NetworkPolicy", [{"ipBlock": {"cidr": "10.96.0.0/16"}}], "spec", "egress", 1, "to"),
    ),
    (
        checks.runtimes_are_what_the_operator_expects,
        TRAIN_JOB,
        of_one("TrainJob", "other", "spec", "runtimeRef", "name"),
    ),
    (checks.runtimes_are_what_the_operator_expects, TRAIN_JOB, of_container("trainer", "name")),
    (
        checks.runtimes_are_what_the_operator_expects,
        TRAIN_JOB,
        lambda parts: parts.container["env"].append({"name": "PET_NNODES", "value": "4"}),
    ),
    (checks.runtimes_are_what_the_operator_expects, TRAIN_JOB, lambda parts: parts.objects.reverse()),
]


@needs_kubectl
@pytest.mark.parametrize(("check", "build", "breaking"), BROKEN)
def test_a_mistake_in_a_manifest_is_found(check, build, breaking):
    objects = objects_of(build)
    check(parts_of(objects))
    breaking(parts_of(objects))
    with pytest.raises(FOUND):
        check(parts_of(objects))


def test_every_check_has_a_mistake_that_it_finds():
    assert {check for check, _, _ in BROKEN} == set(CHECKS)
