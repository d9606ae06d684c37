"""Write a folder for `kubectl apply -k`: the base and components of k8s/ that a training needs, and its patches."""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from distap.apps.k8s.manifests import built
from distap.apps.k8s.recipes import arguments_of, cautions, checked_recipe
from distap.apps.k8s.request import Request, claim_of, parsed_image, quantity_bytes
from distap.apps.k8s.sizes import GIB, OWN_RUN, TEMPORARY, sizes_of
from distap.config.recipe import Recipe
from distap.errors import DistapError
from distap.processes.rendezvous import C10D_PORT
from distap.processes.stopping import MARGIN_SECONDS

WRITTEN = ("kustomization.yaml", "base", "components", "training")
KILL_SECONDS = 30  # for the container to end after the launcher has killed late ranks
HEAD = "# Written by `distap k8s render`"  # of the templates
logger = logging.getLogger("distap")
_TEMPLATES = Environment(
    loader=PackageLoader("distap.apps.k8s"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_TEMPLATES.filters["json"] = partial(
    json.dumps, ensure_ascii=False
)  # every text is quoted, so that none is taken for another type of YAML


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
    (container,) = base["spec"]["template"]["spec"]["containers"]
    arguments = arguments_of(container["args"], request, recipe, overrides)
    checked = checked_recipe(recipe, arguments, request)
    _check_output(output)
    for caution in cautions(checked):
        warn(caution)
    values = _values(request, checked) | {"base_name": base["metadata"]["name"], "container": container["name"]}
    output = output.resolve()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
            draft = Path(scratch, "draft")
            for part in ("base", *values["components"]):
                if part != "training":
                    shutil.copytree(manifests / part, draft / part)
            (draft / "training").mkdir()
            shutil.copyfile(recipe, draft / "training" / "recipe.yaml")
            for file, template in (
                ("kustomization.yaml", "kustomization.yaml"),
                ("training/kustomization.yaml", "training.yaml"),
                ("training/job.yaml", "job.yaml"),
            ):
                text = _TEMPLATES.get_template(template).render(values, arguments=arguments)
                (draft / file).write_text(text, encoding="utf-8")
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


def _values(request: Request, recipe: Recipe) -> dict[str, Any]:
    """Return the variables of the templates."""
    sizes, is_train_job = sizes_of(recipe, request), request.kind == "trainjob"
    data, runs = claim_of(request.data, "--data"), claim_of(request.checkpoints, "--checkpoints")
    spool = request.spool or f"{sizes.spool}Gi"
    disk = ceil(quantity_bytes(spool, "--spool") / GIB) + TEMPORARY + (0 if runs else OWN_RUN)
    # First changes of the Job, then changes of its kind.
    components = {
        "components/gpu": request.gpus > 0,
        "components/data-url": data is None,
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
        "data": data,
        "runs": runs,
        "cpu": request.cpu or sizes.cpu,
        "memory": request.memory or f"{sizes.memory}Gi",
        "spool": spool,
        "disk": disk,
        "shared_memory": sizes.shared_memory,
        "temporary": TEMPORARY,
        "own_run": OWN_RUN,
        "grace_seconds": ceil(recipe.stop.grace_seconds) + MARGIN_SECONDS + KILL_SECONDS,
        "rendezvous_port": C10D_PORT,
    }
