"""Every manifest that tests look at: overlays of k8s/, sets of components, and rendered ones; each built once."""

import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from distap.apps.k8s.rendering import built, manifests_folder, render
from distap.apps.k8s.request import Request

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is missing, which builds manifests"
)
K8S = manifests_folder()
GUIDE = (Path(__file__).parents[2] / "docs/guides/kubernetes.md").read_text()
PATCH, PATCHED_CONTAINER, COPY, TRAIN_JOB = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
DIGEST = f"registry.example/team/distap@sha256:{'0' * 64}"
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
COMPONENT_SETS = {
    "object store, data behind a URL": ["recipe", "object-store", "data-url"],
    "a queued GPU job with a priority": ["recipe", "gpu", "kueue", "kueue-topology", "priority"],
    "a queued JobSet in its own zone": ["recipe", "kueue", "jobset", "exclusive-zone"],
    "a TrainJob with its own runtime": ["recipe", "gpu", "kueue", "trainjob", "trainjob-in-namespace"],
}
RECIPE = """
run: runs/mine
steps: 100
data: {train: s3://bucket/train, image_size: 224}
sampling: {name: random, batch_size: 4096}
model: {backbone: resnet50}
stop: {grace_seconds: 200.5}
"""
STORAGE: dict[str, dict[str, Any]] = {
    "claims": {"data": "pvc://shards/train", "validation": "pvc://shards/test", "checkpoints": "pvc://runs/team"},
    "object store": {"data": "s3://bucket/{000..009}.tar", "checkpoints": "s3://bucket/runs"},
}
DEVICES: dict[str, dict[str, Any]] = {"cpu": {"ranks": 3}, "gpu": {"gpus": 4}}
REQUESTS: dict[str, dict[str, Any]] = {
    f"{kind} {device} {storage}": {"kind": kind, **DEVICES[device], **STORAGE[storage]}
    for kind in ("indexed-job", "jobset", "trainjob")
    for device in DEVICES
    for storage in STORAGE
} | {
    "with every option": {
        "kind": "jobset",
        "gpus": 8,
        **STORAGE["claims"],
        "namespace": "research",
        "queue": "gpus",
        "secret": "keys",
        "monitoring": "prometheus",
        "cpu": 96,
        "memory": "900Gi",
        "spool": "2Ti",
        "priority": "high",
        "env": ["NCCL_SOCKET_IFNAME=eth0", "GREETING=of $(HOME): 'a'"],
        "rdma": "vpc.amazonaws.com/efa=4",
        "restarts": 3,
        "join_timeout": 3600,
    },
    "restarts of a TrainJob": {"kind": "trainjob", "restarts": 0, "rdma": "rdma/ib", **STORAGE["claims"]},
    "restarts of a Job": {"kind": "indexed-job", "restarts": 2, "join_timeout": 60, **STORAGE["claims"]},
    "one host of one rank": {"kind": "indexed-job", "nodes": 1, **STORAGE["object store"]},
    "a runtime of the cluster": {"kind": "trainjob", "gpus": 1, "runtime": "cluster", **STORAGE["claims"]},
    "the recipe's own data": {"kind": "indexed-job", "checkpoints": "gs://bucket/runs"},
}
RENDERED = sorted(REQUESTS)
BUILDS = [*OVERLAYS, *COMPONENT_SETS, *RENDERED]
Objects = list[dict[str, Any]]


def request(**options: Any) -> Request:
    """Options of a rendering, some of them given."""
    return Request(**{"name": "emoji", "image": DIGEST, "nodes": 4, "kind": "indexed-job", **options})


@cache
def _text(build: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "folder")
        if build in OVERLAYS:
            folder = K8S / "overlays" / build
        elif build in COMPONENT_SETS:
            shutil.copytree(K8S, folder)
            components = [f"components/{name}" for name in COMPONENT_SETS[build]]
            if "data-url" in COMPONENT_SETS[build]:
                recipe = folder / "components" / "recipe" / "recipe.yaml"
                text = recipe.read_text().replace("/data/", "s3://bucket/")
                recipe.write_text(text.replace("{every: 20}", "{every: 20, store: s3://bucket/runs}"))
            (folder / "kustomization.yaml").write_text(
                yaml.safe_dump({"resources": ["base"], "components": components, "sortOptions": {"order": "fifo"}})
            )
        else:
            recipe = Path(scratch, "recipe.yaml")
            recipe.write_text(RECIPE)
            render(folder, request(**REQUESTS[build]), recipe)
        return built(folder)


def objects_of(build: str) -> Objects:
    """The objects that a build gives; a copy, to be changed at will."""
    return list(yaml.safe_load_all(_text(build)))
