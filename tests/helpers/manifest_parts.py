"""What checks look at in the objects of a build, whatever kind runs the training."""

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from built_manifests import Objects
from torch.distributed import run as torchrun

from distap.config.reading import load_recipe
from distap.config.recipe import Recipe

OPERATORS_PORT = "29500"  # of Kubeflow Trainer
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")


@dataclass(frozen=True)
class Parts:
    """A training, taken apart."""

    objects: Objects
    outer: dict[str, Any]  # Job, JobSet or TrainJob
    job_set: dict[str, Any] | None  # the spec of one
    job: dict[str, Any]  # the spec of a Job
    subdomain: str

    @property
    def name(self) -> str:
        return str(self.outer["metadata"]["name"])

    @property
    def template(self) -> dict[str, Any]:
        return self.job["template"]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def pod(self) -> dict[str, Any]:
        return self.template["spec"]

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["containers"]
        return container

    @property
    def hosts(self) -> int:
        return self.outer["spec"]["trainer"]["numNodes"] if self.is_train_job else self.job["completions"]

    @property
    def is_train_job(self) -> bool:
        return self.outer["kind"] == "TrainJob"

    @property
    def first_host(self) -> str:
        """The name by which other pods find the first one."""
        prefix = self.name if self.job_set is None else f"{self.name}-node-0"
        return f"{prefix}-0.{self.subdomain}"

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def metrics_ports(self) -> dict[str, int]:
        return {name: port for name, port in self.ports.items() if name.startswith("metrics-")}

    @property
    def environment(self) -> dict[str, str]:
        """As the container gets it: what the operator adds to a TrainJob's, and references resolved in order."""
        resolved: dict[str, str] = {}
        for entry in self.container["env"]:
            resolved[entry["name"]] = _expanded(entry["value"], resolved)
        if self.is_train_job:
            trainer = self.outer["spec"]["trainer"]
            resolved |= {
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": "0",
                "PET_MASTER_ADDR": f"{self.name}-node-0-0.{self.name}",
                "PET_MASTER_PORT": OPERATORS_PORT,
            }
        return resolved

    @property
    def arguments(self) -> list[str]:
        """As the container gets them."""
        return [_expanded(argument, self.environment) for argument in self.container["args"]]

    @property
    def launch(self) -> argparse.Namespace:
        """What torchrun's own parser makes of arguments and environment."""
        with _environment(self.environment):
            return torchrun.get_args_parser().parse_args(self.arguments)

    @property
    def recipe_file(self) -> Path:
        return Path(self.launch.training_script)

    @property
    def recipe(self) -> Recipe:
        """As a rank reads it."""
        launch = self.launch
        with TemporaryDirectory() as scratch:
            file = Path(scratch, "recipe.yaml")
            file.write_text(self.one("ConfigMap")["data"][self.recipe_file.name])
            return load_recipe(file, launch.training_script_args)

    @property
    def mounts(self) -> dict[str, dict[str, Any]]:
        """Volume by the path at which it is mounted, with `readOnly` of the mount."""
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        return {
            mount["mountPath"]: {**volumes[mount["name"]], "readOnly": mount.get("readOnly", False)}
            for mount in self.container["volumeMounts"]
        }

    def one(self, kind: str) -> dict[str, Any]:
        """The object of a kind, of which there has to be one."""
        found = [one for one in self.objects if one["kind"] == kind]
        assert len(found) == 1, f"{len(found)} objects of kind {kind}"
        return found[0]


def parts_of(objects: Objects) -> Parts:
    """Take a build apart."""
    by_kind = {one["kind"]: one for one in objects}
    if "TrainJob" in by_kind:
        (runtime,) = (by_kind[kind] for kind in RUNTIMES if kind in by_kind)
        outer, job_set = by_kind["TrainJob"], runtime["spec"]["template"]["spec"]
    elif "JobSet" in by_kind:
        outer = by_kind["JobSet"]
        job_set = outer["spec"]
    else:
        job = by_kind["Job"]
        return Parts(objects, job, None, job["spec"], job["spec"]["template"]["spec"]["subdomain"])
    (replicated,) = job_set["replicatedJobs"]
    # Where it is not said, JobSet takes its own name, which for a TrainJob's is the TrainJob's.
    subdomain = job_set["network"].get("subdomain", outer["metadata"]["name"])
    return Parts(objects, outer, job_set, replicated["template"]["spec"], subdomain)


def _expanded(text: str, environment: dict[str, str]) -> str:
    """With $(NAME) replaced as the kubelet does it: what is unknown stays, and $$ is a dollar."""
    return re.sub(r"\$(?:\$|\((\w+)\))", lambda match: environment.get(match[1], match[0]) if match[1] else "$", text)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
