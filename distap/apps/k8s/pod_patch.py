"""Read the file of --patch: changes of the pod template, which kustomize merges as `kubectl patch` does."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from distap.errors import DistapError, problem_of
from distap.registry import suggestion


class NamedEntry(BaseModel):
    """An entry of a list that is merged by name."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str


FIELDS: list[tuple[Any, str]] = [  # of PodSpec in Kubernetes 1.37
    (list[NamedEntry], "containers imagePullSecrets initContainers resourceClaims volumes"),
    (list, "evictionResponders hostAliases readinessGates schedulingGates tolerations topologySpreadConstraints"),
    (dict[str, str | None], "nodeSelector"),
    (dict, "affinity dnsConfig os overhead resources schedulingGroup securityContext"),
    (bool, "automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers"),
    (bool, "setHostnameAsFQDN shareProcessNamespace"),
    (int, "activeDeadlineSeconds priority terminationGracePeriodSeconds"),
    (str, "dnsPolicy hostname hostnameOverride nodeName preemptionPolicy priorityClassName restartPolicy"),
    (str, "runtimeClassName schedulerName serviceAccount serviceAccountName subdomain"),
]
_CLOSED = ConfigDict(extra="forbid", strict=True)
_PARTS: dict[str, dict[str, Any]] = {
    "metadata": dict.fromkeys(("annotations", "labels"), (dict[str, str | None] | None, None)),
    "spec": {name: (kind | None, None) for kind, names in FIELDS for name in names.split()},
}
_TEMPLATE = create_model(  # type: ignore[call-overload]
    "PodTemplate",
    __config__=_CLOSED,
    **{key: (create_model(key, __config__=_CLOSED, **fields) | None, None) for key, fields in _PARTS.items()},
)


def read_pod_patch(path: Path, container: str) -> dict[str, Any]:
    """Return a patch of a pod template whose container is `container`; a DistapError names each wrong key."""
    try:
        patch = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(patch, dict):
            raise DistapError(f"--patch {path}: expected the keys metadata and spec of a pod template")
        _TEMPLATE.model_validate(patch)
    except (OSError, UnicodeDecodeError) as error:
        raise DistapError(f"--patch {path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise DistapError(f"--patch {path}: not valid YAML: {error}") from error
    except ValidationError as error:
        problems = [_problem(dict(item), [str(key) for key in item["loc"]]) for item in error.errors()]
        raise DistapError(f"--patch {path}: " + f"\n--patch {path}: ".join(problems)) from error
    for entry in (patch.get("spec") or {}).get("containers") or ():
        if entry["name"] != container:
            raise DistapError(
                f"--patch {path}: spec.containers: {entry['name']}: expected {container}, the pod's only container; "
                "one beside it goes into spec.initContainers, with restartPolicy: Always"
            )
    return patch


def _problem(error: dict[str, Any], keys: list[str]) -> str:
    if error["type"] == "extra_forbidden":
        known = _PARTS.get(keys[0], _PARTS) if len(keys) > 1 else _PARTS
        return f"{'.'.join(keys)}: unknown key; {suggestion(keys[-1], known)}"
    return problem_of(error, keys)
