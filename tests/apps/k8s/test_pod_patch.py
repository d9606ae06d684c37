"""The file of --patch, in the manifests of every kind, and the errors of wrong ones."""

import json
from importlib.resources import files

import kubernetes_validate
import manifest_checks as checks
import pytest
import yaml
from built_manifests import PATCH, PATCHED_CONTAINER, RECIPE, STORAGE, needs_kubectl, request
from manifest_parts import parts_of

from distap.apps.k8s.pod_patch import FIELDS, read_pod_patch
from distap.apps.k8s.rendering import built, render
from distap.errors import DistapError

KINDS = ["indexed-job", "jobset", "trainjob"]
UNCHANGED = [
    checks.core_objects_are_valid,
    checks.the_api_server_takes_it,
    checks.operator_objects_are_valid,
    checks.selectors_select_the_pods,
    checks.hosts_meet,
    checks.volumes_are_mounted,
    checks.exit_codes_are_read,
    checks.runtimes_are_what_the_operator_expects,
]


def patched(folder, kind, patch):
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "patch.yaml").write_text(patch if isinstance(patch, str) else yaml.safe_dump(patch))
    asked = request(kind=kind, gpus=4, patch=folder / "patch.yaml", **STORAGE["claims"])
    render(folder / "out", asked, folder / "recipe.yaml")
    parts = parts_of(list(yaml.safe_load_all(built(folder / "out"))))
    for check in UNCHANGED:
        check(parts)
    return parts


@needs_kubectl
@pytest.mark.parametrize("kind", KINDS)
def test_the_patch_of_the_guide_is_in_the_pods_of_every_kind(tmp_path, kind):
    given, parts = yaml.safe_load(PATCH), patched(tmp_path, kind, PATCH)
    for key in ("nodeSelector", "tolerations", "runtimeClassName", "serviceAccountName", "imagePullSecrets"):
        assert parts.pod[key] == given["spec"][key], key
    context = parts.pod["securityContext"]
    assert context["runAsNonRoot"] and not {"runAsUser", "runAsGroup", "fsGroup"} & set(context)
    checks.others_leave_the_pods_alone(parts)
    assert parts.template["metadata"]["annotations"]["example.org/team"] == "vision"


@needs_kubectl
@pytest.mark.parametrize("kind", KINDS)
def test_a_patch_merges_containers_variables_and_volumes_by_name(tmp_path, kind):
    patch = yaml.safe_load(PATCHED_CONTAINER)
    (container,) = patch["spec"]["containers"]
    container["env"] = [{"name": "HOME", "value": "/spool"}, {"name": "NCCL_DEBUG", "value": "INFO"}]
    container["volumeMounts"] = [{"name": "weights", "mountPath": "/weights"}]
    patch["spec"]["volumes"] = [
        {"name": "weights", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "shm", "emptyDir": {"sizeLimit": "9Gi"}},
    ]
    patch["spec"]["initContainers"] = [{"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}]
    parts = patched(tmp_path, kind, patch)
    assert (parts.environment["HOME"], parts.environment["NCCL_DEBUG"]) == ("/spool", "INFO")
    assert {"/weights", "/runs", "/data", "/tmp"} <= set(parts.mounts)
    assert parts.mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "9Gi"}
    limits = parts.container["resources"]["limits"]
    assert (limits["hugepages-2Mi"], limits["nvidia.com/gpu"]) == ("5Gi", "4")


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("spec: [", "not valid YAML"),
        ("- spec", "expected the keys metadata and spec"),
        ("template: {}", "template: unknown key; expected one of metadata, spec"),
        ("spec: {nodeselector: {a: b}}", "spec.nodeselector: unknown key; did you mean nodeSelector?"),
        ("metadata: {name: emoji}", "metadata.name: unknown key; expected one of annotations, labels"),
        ("spec: {nodeSelector: {gpu: true}}", "spec.nodeSelector.gpu: True: must be text"),
        ("spec: {tolerations: {key: a}}", "spec.tolerations: must be a list"),
        ("spec: {hostNetwork: 'yes'}", "spec.hostNetwork: 'yes': must be true or false"),
        ("spec: {volumes: [{emptyDir: {}}]}", "spec.volumes.0.name: missing"),
        ("spec: {containers: [{name: main}]}", "spec.containers: main: expected node, the pod's only container"),
    ],
)
def test_a_wrong_patch_is_refused_with_its_file_and_key(tmp_path, patch, said):
    file = tmp_path / "patch.yaml"
    file.write_text(patch)
    with pytest.raises(DistapError) as error:
        read_pod_patch(file, "node")
    assert f"--patch {file}: {said}" in str(error.value)


def test_a_missing_patch_is_named(tmp_path):
    with pytest.raises(DistapError, match=r"--patch .*none\.yaml: cannot be read"):
        read_pod_patch(tmp_path / "none.yaml", "node")


def test_a_patch_may_have_every_field_of_a_pod():
    version = f"v{checks.KUBERNETES}.0-local"
    schema = files(kubernetes_validate) / "kubernetes-json-schema" / version / "podspec-v1.json"
    known = {name for _, names in FIELDS for name in names.split()}
    assert known == set(json.loads(schema.read_text())["properties"]) - {"ephemeralContainers"}
