"""Write a folder for `kubectl apply -k`: the base and components of k8s/ that a training needs, and its patches."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from distap.apps.k8s.manifests import built
from distap.apps.k8s.recipes import arguments_of, cautions, checked_recipe
from distap.apps.k8s.request import Request, claim_of, parsed_image, quantity_bytes
from distap.apps.k8s.sizes import GIB, OWN_RUN, TEMPORARY, Sizes, sizes_of
from distap.config.recipe import Recipe
from distap.errors import DistapError
from distap.processes.rendezvous import C10D_PORT
from distap.processes.stopping import MARGIN_SECONDS

HEAD = "# Written by `distap k8s render`, which writes the whole folder anew: change its options, not these files.\n"
WRITTEN = ("kustomization.yaml", "base", "components", "training")
KILL_SECONDS = 30  # for the container to end after the launcher has killed late ranks
FIRST_METRICS_PORT = 9400
SCRAPER = "/spec/ingress/1/from/0/namespaceSelector/matchLabels"  # of the NetworkPolicy in k8s/base
BEFORE_THE_TRAINING = ["NetworkPolicy", "ConfigMap", "Service", "TrainingRuntime", "ClusterTrainingRuntime"]
logger = logging.getLogger("distap")
COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}


def render(
    manifests: Path,
    output: Path,
    request: Request,
    recipe: Path,
    overrides: Sequence[str] = (),
    warn: Callable[[str], None] = logger.warning,
) -> None:
    """Write the folder `output`; one that an earlier call wrote is replaced, unless it holds other files.

    Args:
        manifests: k8s/.
        recipe: the file, and `overrides` the changes to it.
        warn: receives preparations that somebody has to make outside of the manifests.
    Raises:
        DistapError: options and recipe do not fit, or the folder cannot be written; nothing was written then.
    """
    base = yaml.safe_load((manifests / "base" / "job.yaml").read_text())
    arguments = arguments_of(_container(base)["args"], request, recipe, overrides)
    checked = checked_recipe(recipe, arguments, request)
    _check_output(output)
    for caution in cautions(checked):
        warn(caution)
    output = output.resolve()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
            draft = Path(scratch, "draft")
            _fill(draft, manifests, request, recipe, _job(base, request, checked, arguments))
            if output.exists():
                shutil.rmtree(output)
            draft.rename(output)
    except OSError as error:
        raise DistapError(f"--output {output}: cannot be written: {error.strerror or error}") from error


def rendered(
    manifests: Path,
    request: Request,
    recipe: Path,
    overrides: Sequence[str] = (),
    warn: Callable[[str], None] = logger.warning,
) -> str:
    """Return the manifests as YAML, built by kubectl; the arguments are those of `render`."""
    with tempfile.TemporaryDirectory() as scratch:
        render(manifests, Path(scratch, request.name), request, recipe, overrides, warn)
        return built(Path(scratch, request.name))


def _fill(draft: Path, manifests: Path, request: Request, recipe: Path, job: dict[str, Any]) -> None:
    shutil.copytree(manifests / "base", draft / "base")
    components = _components(request)
    for component in components:
        if component != "training":
            shutil.copytree(manifests / component, draft / component)
    training = draft / "training"
    training.mkdir()
    shutil.copyfile(recipe, training / "recipe.yaml")
    _write(training / "job.yaml", job)
    _write(training / "name.yaml", _replaced("/metadata/name", request.name))
    _write(training / "monitoring.yaml", _replaced(SCRAPER, {"kubernetes.io/metadata.name": request.monitoring}))
    _write(training / "kustomization.yaml", _training(request))
    _write(draft / "kustomization.yaml", _kustomization(request, components))


def _check_output(output: Path) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    ours = output / "kustomization.yaml"
    if not (ours.is_file() and ours.read_text().startswith(HEAD)):
        raise DistapError(f"--output {output}: something else is there; name a new folder")
    foreign = sorted(path.name for path in output.iterdir() if path.name not in WRITTEN)
    if foreign:
        raise DistapError(
            f"--output {output}: {', '.join(foreign)} would be lost, since the whole folder is written anew; move it "
            "elsewhere, such as into a kustomization around this folder, or name a new one"
        )


def _components(request: Request) -> list[str]:
    """Return folders below k8s/ in order: changes of the Job come before changes of its kind."""
    chosen = {
        "components/gpu": request.gpus > 0,
        "components/data-url": claim_of(request.data, "--data") is None,
        "components/object-store": claim_of(request.checkpoints, "--checkpoints") is None,
        "training": True,
        "components/jobset": request.kind == "jobset",
        "components/trainjob": request.kind == "trainjob",
        "components/trainjob-in-namespace": request.kind == "trainjob" and request.runtime == "namespace",
    }
    return [component for component, is_needed in chosen.items() if is_needed]


def _kustomization(request: Request, components: list[str]) -> dict[str, Any]:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **({"namespace": request.namespace} if request.namespace else {}),
        "resources": ["base"],
        "components": components,
        # Pods start behind their policy. A TrainJob is refused before its runtime, which by name comes after it.
        "sortOptions": {
            "order": "legacy",
            "legacySortOptions": {"orderFirst": BEFORE_THE_TRAINING, "orderLast": []},
        },
    }


def _training(request: Request) -> dict[str, Any]:
    """Return the component that names the objects of k8s/base and patches the Job."""
    image = parsed_image(request.image)
    version = {"digest": image.digest} if image.digest else {"newTag": image.tag or "latest"}
    return {
        **COMPONENT,
        "images": [{"name": "distap", "newName": image.name, **version}],
        "labels": [{"pairs": {"app.kubernetes.io/instance": request.name}, "includeSelectors": True}],
        "configMapGenerator": [
            {
                "name": f"{request.name}-recipe",
                "files": ["recipe.yaml"],
                "options": {
                    "labels": {"app.kubernetes.io/name": "distap", "app.kubernetes.io/component": "trainer"},
                },
            }
        ],
        "patches": [
            {"target": {"kind": "Job"}, "path": "job.yaml"},
            {"target": {"kind": "NetworkPolicy"}, "path": "monitoring.yaml"},
            {
                "target": {"kind": "Job|Service|NetworkPolicy"},
                "path": "name.yaml",
                "options": {"allowNameChange": True},
            },
        ],
    }


def _replaced(path: str, value: Any) -> list[dict[str, Any]]:  # a JSON patch
    return [{"op": "replace", "path": path, "value": value}]


def _job(base: dict[str, Any], request: Request, recipe: Recipe, arguments: list[str]) -> dict[str, Any]:
    """Return a strategic merge patch of the Job."""
    sizes = sizes_of(recipe, request)
    pod = {
        "subdomain": request.name,
        "terminationGracePeriodSeconds": ceil(recipe.stop.grace_seconds) + MARGIN_SECONDS + KILL_SECONDS,
        **({"priorityClassName": request.priority} if request.priority else {}),
        "containers": [
            {
                "name": _container(base)["name"],
                # Otherwise the kubelet would take a $(NAME) in a recipe's text for a variable.
                "args": [argument.replace("$", "$$") for argument in arguments],
                **_settings(request, sizes),
            }
        ],
        "volumes": _volumes(request, sizes),
    }
    labels = {"kueue.x-k8s.io/queue-name": request.queue} if request.queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": base["metadata"]["name"], "labels": labels},
        "spec": {"completions": request.nodes, "parallelism": request.nodes, "template": {"spec": pod}},
    }


def _settings(request: Request, sizes: Sizes) -> dict[str, Any]:
    """Return environment, ports and resources of the container."""
    cpu = request.cpu or sizes.cpu
    environment = {
        "PET_NNODES": request.nodes,
        "PET_NPROC_PER_NODE": request.ranks_a_host,
        "PET_RDZV_ID": request.name,
        "PET_RDZV_ENDPOINT": f"{request.name}-0.{request.name}:{C10D_PORT}",
        "OMP_NUM_THREADS": max(1, cpu // request.ranks_a_host),
    }
    limits = {"memory": request.memory or f"{sizes.memory}Gi"}
    if request.gpus:
        limits["nvidia.com/gpu"] = str(request.gpus)
    spool = ceil(quantity_bytes(_spool(request, sizes), "--spool") / GIB)
    disk = spool + TEMPORARY + (OWN_RUN if claim_of(request.checkpoints, "--checkpoints") is None else 0)
    ranks = range(request.ranks_a_host)
    return {
        "env": [{"name": name, "value": str(value)} for name, value in environment.items()],
        "envFrom": [{"secretRef": {"name": request.secret, "optional": True}}],
        "ports": [
            {"$patch": "replace"},
            {"name": "rendezvous", "containerPort": C10D_PORT},
            *({"name": f"metrics-{rank}", "containerPort": FIRST_METRICS_PORT + rank} for rank in ranks),
        ],
        "resources": {"requests": {"cpu": str(cpu), "ephemeral-storage": f"{disk}Gi", **limits}, "limits": limits},
    }


def _volumes(request: Request, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the volumes that replace those of k8s/base."""
    data, runs = claim_of(request.data, "--data"), claim_of(request.checkpoints, "--checkpoints")
    volumes = {
        "recipe": {"configMap": {"name": f"{request.name}-recipe"}},
        "runs": {"persistentVolumeClaim": {"claimName": runs.name}} if runs else _scratch(f"{OWN_RUN}Gi"),
        "spool": _scratch(_spool(request, sizes)),
        "tmp": _scratch(f"{TEMPORARY}Gi"),
        "shm": _scratch(f"{sizes.shared_memory}Gi"),
    }
    if data is not None:
        # It is mounted read-only in any case, but a driver mounts a claim one way only if it is asked for both.
        both = {"readOnly": None} if runs and runs.name == data.name else {}
        volumes["data"] = {"persistentVolumeClaim": {"claimName": data.name, **both}}
    return [{"name": name, **volume} for name, volume in volumes.items()]


def _spool(request: Request, sizes: Sizes) -> str:
    return request.spool or f"{sizes.spool}Gi"


def _scratch(size: str) -> dict[str, Any]:
    return {"emptyDir": {"sizeLimit": size}}


def _container(job: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    return container


def _write(path: Path, content: dict[str, Any] | list[dict[str, Any]]) -> None:
    path.write_text(HEAD + yaml.safe_dump(content, sort_keys=False, width=118), encoding="utf-8")
