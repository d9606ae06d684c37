"""Write a folder for `kubectl apply -k`: the base and components of k8s/ that a training needs, and its patches."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from distap.apps.k8s.pod_patch import read_pod_patch
from distap.apps.k8s.recipes import arguments_of, cautions, checked_recipe
from distap.apps.k8s.request import Request, parsed_image, quantity_bytes
from distap.apps.k8s.sizes import GIB, OWN_RUN, TEMPORARY, sizes_of
from distap.config.reading import recipe_file
from distap.config.recipe import Recipe
from distap.errors import DistapError
from distap.processes.rendezvous import C10D_PORT
from distap.processes.stopping import MARGIN_SECONDS
from distap.storage.atomic import refuse_foreign, replacing_folder

RUNBOOK = "k8s/monitoring/RUNBOOK.md"
WRITTEN = ("kustomization.yaml", "base", "components", "training", "task")
JOIN_SPARE = 600  # seconds that probes wait longer than hosts wait for each other
KILL_SECONDS = 30  # for the container to end after the launcher has killed late ranks
HEAD = "# Written by `distap k8s "  # of the templates
TEMPLATES = Environment(
    loader=PackageLoader("distap.apps.k8s"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
# The templates quote every text with it, so that YAML takes none for another type.
TEMPLATES.filters["json"] = partial(json.dumps, ensure_ascii=False, default=str)


def manifests_folder() -> Path:
    """Return the installed copy of k8s/, the folder of kustomize bases, overlays and components."""
    folder = Path(__file__).parent / "files"
    if not (folder / "monitoring").is_dir():
        raise DistapError(f"{folder}: the manifests are missing; install distap anew, from a clone with its k8s/")
    return folder


def plain_rules(runbook: str = RUNBOOK) -> str:
    """Return the recording rules and alerts as a rule file for a Prometheus without its operator."""
    text = (manifests_folder() / "monitoring" / "prometheusrule.yaml").read_text("utf-8")
    return dedent(text.partition("\nspec:\n")[2]).replace(RUNBOOK, runbook)


def render(output: Path, request: Request, recipe: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Write the folder `output`; one that an earlier call wrote is replaced, unless it holds other files.

    Return the preparations that somebody has to make outside of the manifests.
    """
    manifests = manifests_folder()
    base = yaml.safe_load((manifests / "base" / "job.yaml").read_text())
    (container,) = base["spec"]["template"]["spec"]["containers"]
    arguments = arguments_of(container["args"], request, recipe, overrides)
    checked = checked_recipe(recipe, arguments, request)
    require_own(output)
    values = _values(request, checked) | {
        "base_name": base["metadata"]["name"],
        "container": container["name"],
        "patch": request.patch and read_pod_patch(request.patch, container["name"]),
    }
    with replacing_folder(output.resolve()) as folder:
        for part in ("base", *values["components"]):
            if part != "training":
                shutil.copytree(manifests / part, folder / part)
        (folder / "training").mkdir()
        shutil.copyfile(recipe_file(recipe), folder / "training" / "recipe.yaml")
        for file, template in (
            ("kustomization.yaml", "kustomization.yaml"),
            ("training/kustomization.yaml", "training.yaml"),
            ("training/job.yaml", "job.yaml"),
        ):
            text = TEMPLATES.get_template(template).render(values, arguments=arguments)
            (folder / file).write_text(text, encoding="utf-8")
    return list(cautions(checked, request))


def require_own(output: Path) -> None:
    """Refuse a folder that no earlier call wrote, or to which somebody has added files."""
    head = output / "kustomization.yaml"
    refuse_foreign(output, WRITTEN if head.is_file() and head.read_text().startswith(HEAD) else ())


def built(folder: Path) -> str:
    """Return the manifests of a kustomization as YAML; this needs kubectl, but no cluster."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise DistapError(
            "--output -: kubectl is not installed; install it, or name a folder and build that elsewhere (`kubectl "
            "apply -k FOLDER` or `kustomize build FOLDER`)"
        )
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise DistapError(f"{folder}: kubectl kustomize refuses it: {done.stderr.strip()}")
    return done.stdout


def _values(request: Request, recipe: Recipe) -> dict[str, Any]:
    sizes, is_train_job = sizes_of(recipe, request), request.kind == "trainjob"
    runs, spool = request.run_claim, request.spool or f"{sizes.spool}Gi"
    # First changes of the Job, then changes of its kind.
    components = {
        "components/gpu": request.gpus > 0,
        "components/data-url": request.data_claim is None,
        "components/object-store": runs is None,
        "training": True,
        "components/jobset": request.kind == "jobset",
        "components/trainjob": is_train_job,
        "components/trainjob-in-namespace": is_train_job and request.runtime == "namespace",
    }
    return {
        "request": request,
        "image": parsed_image(request.image),
        "components": [component for component, is_needed in components.items() if is_needed],
        "data": request.data_claim,
        "runs": runs,
        "cpu": request.cpu or sizes.cpu,
        "memory": request.memory or f"{sizes.memory}Gi",
        "spool": spool,
        "disk": ceil(quantity_bytes(spool, "--spool") / GIB) + TEMPORARY + (0 if runs else OWN_RUN),
        "shared_memory": sizes.shared_memory,
        "temporary": TEMPORARY,
        "own_run": OWN_RUN,
        "grace_seconds": ceil(recipe.stop.grace_seconds) + MARGIN_SECONDS + KILL_SECONDS,
        "rendezvous_port": C10D_PORT,
        "join_spare": JOIN_SPARE,
    }
