"""The options of `distap k8s render` and `distap k8s task`, and their checks."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NamedTuple

from typer import Option

from distap.errors import DistapError

Kind = Literal["indexed-job", "jobset", "trainjob"]
MAX_RANKS = 16  # a host; the NetworkPolicy of k8s/base opens so many metrics ports
LONGEST_NAME = 63  # of a pod, and of a label's value
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_NAMESPACE.pattern}(\.{_NAMESPACE.pattern})*")
_STORE = re.compile(r"(s3|gs)://[^\s/?#]+(/[^\s?#]*)?")
_QUANTITY = re.compile(r"([1-9][0-9]*)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_RESOURCE = re.compile(rf"(?P<name>{_SUBDOMAIN.pattern}/[\w.-]*\w)(=(?P<count>[1-9]\d*))?", re.ASCII)
_IMAGE = re.compile(
    r"(?P<name>([^\s:@/]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*)(:(?P<tag>[\w][\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


class Claim(NamedTuple):
    """A folder of a PersistentVolumeClaim, written `pvc://CLAIM/FOLDER`."""

    name: str
    folder: str  # "" for all of it


@dataclass(frozen=True, kw_only=True)
class PodRequest:
    """Options of all pods; a DistapError names a wrong one."""

    name: Annotated[str, Option(help="Name of the training or task and its objects, and of the run of a training.")]
    image: Annotated[str, Option(help="Container image, best by digest: NAME@sha256:DIGEST.")]
    gpus: Annotated[int, Option(help="GPUs of a pod; a training has one rank on each, and 0 is on CPUs.", min=0)] = 0
    namespace: Annotated[str | None, Option(help="Namespace of all objects.", show_default="kubectl's")] = None
    secret: Annotated[str, Option(help="Secret whose keys become environment variables; it may be missing.")] = (
        "distap-credentials"
    )
    env: Annotated[list[str] | None, Option(help="Environment variable, NAME=VALUE; repeat for several.")] = None
    monitoring: Annotated[str, Option(help="Namespace whose Prometheus may read the metrics.")] = "monitoring"
    priority: Annotated[
        str | None, Option(help="PriorityClass of the pods.", show_default="the cluster's default")
    ] = None
    patch: Annotated[
        Path | None,
        Option(help="YAML file with changes of the pod template; docs/guides/kubernetes.md has examples."),
    ] = None

    def __post_init__(self) -> None:
        self._check_names()
        parsed_image(self.image)
        for text in self.env or ():
            name, _ = _variable(text)
            if name.startswith("PET_") or name == "OMP_NUM_THREADS":
                raise DistapError(f"--env {text}: {name} follows from other options; leave it out")

    @property
    def environment(self) -> dict[str, str]:
        return dict(_variable(text) for text in self.env or ())

    @property
    def longest_pod(self) -> str:
        return f"{self.name}-0123456789-abcde"  # Kubernetes appends such suffixes

    @property
    def devices(self) -> dict[str, int]:
        """Number of devices of a pod by their extended resource."""
        return {"nvidia.com/gpu": self.gpus} if self.gpus else {}

    def _check_names(self) -> None:
        if not _LABEL.fullmatch(self.name):
            wanted = "lower-case letters, digits and dashes, beginning with a letter and not ending with a dash"
            raise DistapError(f"--name {self.name!r}: expected {wanted}")
        if len(self.longest_pod) > LONGEST_NAME:
            shorter = f"make it {len(self.longest_pod) - LONGEST_NAME} shorter"
            raise DistapError(
                f"--name {self.name}: its pods' name, {self.longest_pod}, has over {LONGEST_NAME} characters; "
                f"{shorter}"
            )
        for option in ("namespace", "monitoring", "queue", "secret", "priority"):
            text, has_dots = getattr(self, option, None), option not in ("namespace", "monitoring")
            form = _SUBDOMAIN if has_dots else _NAMESPACE
            if text is not None and not (form.fullmatch(text) and len(text) <= LONGEST_NAME):
                allowed = f"lower-case letters, digits{', dashes and dots' if has_dots else ' and dashes'}"
                raise DistapError(f"--{option} {text!r}: expected {allowed}, {LONGEST_NAME} characters at most")


@dataclass(frozen=True, kw_only=True)
class Request(PodRequest):
    """The options of `distap k8s render`; a DistapError names a wrong one."""

    checkpoints: Annotated[
        str, Option(help="Place of checkpoints: pvc://CLAIM/FOLDER that all pods can write to, or s3:// or gs://.")
    ]
    kind: Annotated[
        Kind, Option(help="Kind of object that runs the training; docs/guides/kubernetes.md compares them.")
    ] = "indexed-job"
    nodes: Annotated[int, Option(help="Number of hosts.", min=1)] = 1
    ranks: Annotated[int | None, Option(help="Ranks of a host without GPUs.", min=1, show_default="1")] = None
    data: Annotated[
        str | None,
        Option(help="Training data: pvc://CLAIM/FOLDER or URL.", show_default="data.train of the recipe"),
    ] = None
    validation: Annotated[
        str | None, Option(help="Validation data, likewise.", show_default="data.validation of the recipe")
    ] = None
    queue: Annotated[str | None, Option(help="LocalQueue of Kueue.", show_default="not queued")] = None
    cpu: Annotated[int | None, Option(help="Cores of a pod.", show_default="2 a rank, and 1 a loader worker")] = None
    memory: Annotated[
        str | None, Option(help="Memory of a pod, such as 64Gi.", show_default="estimated from the recipe")
    ] = None
    spool: Annotated[
        str | None,
        Option(help="Disk of a pod for pixels and cache.", show_default="computed from the recipe"),
    ] = None
    rdma: Annotated[
        str | None,
        Option(help="RDMA devices of a pod, RESOURCE or RESOURCE=COUNT, such as rdma/ib.", show_default="none"),
    ] = None
    restarts: Annotated[
        int | None,
        Option(help="New pods after failures before giving up.", min=0, show_default="6 a host, or 10 times all"),
    ] = None
    join_timeout: Annotated[
        int, Option(help="Seconds that hosts wait for each other, at first and after each failure.", min=1)
    ] = 1800
    runtime: Annotated[
        Literal["namespace", "cluster"],
        Option(help="With --kind trainjob: a TrainingRuntime, or a ClusterTrainingRuntime, which needs more rights."),
    ] = "namespace"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts()
        for option, text in (("--memory", self.memory), ("--spool", self.spool)):
            if text is not None:
                quantity_bytes(text, option)
        if self.rdma is not None and not _RESOURCE.fullmatch(self.rdma):
            raise DistapError(f"--rdma {self.rdma!r}: expected an extended resource, such as rdma/ib or rdma/ib=8")
        self._check_places()
        if self.runtime == "cluster" and self.kind != "trainjob":
            raise DistapError(f"--runtime cluster: needs --kind trainjob, {self.kind} has no runtime")
        if self.runtime == "cluster" and self.namespace:
            raise DistapError(
                "--runtime cluster makes a ClusterTrainingRuntime, which is in no namespace: leave --namespace out "
                f"and apply with `kubectl apply --namespace {self.namespace} -k FOLDER`"
            )

    @property
    def longest_pod(self) -> str:
        job = self.name if self.kind == "indexed-job" else f"{self.name}-node-0"
        return f"{job}-{self.nodes - 1}-abcde"

    @property
    def devices(self) -> dict[str, int]:
        match = _RESOURCE.fullmatch(self.rdma or "")
        return super().devices | ({match["name"]: int(match["count"] or 1)} if match else {})

    @property
    def ranks_a_host(self) -> int:
        return self.gpus or self.ranks or 1

    @property
    def world(self) -> int:  # ranks of the training
        return self.nodes * self.ranks_a_host

    @property
    def data_sets(self) -> dict[str, tuple[str, str | None]]:
        """The options for data, and what they say, by the recipe's key."""
        return {"data.train": ("--data", self.data), "data.validation": ("--validation", self.validation)}

    @property
    def data_claim(self) -> Claim | None:
        return claim_of(self.data, "--data")

    @property
    def run_claim(self) -> Claim | None:
        return claim_of(self.checkpoints, "--checkpoints")

    def _check_counts(self) -> None:
        if self.gpus and self.ranks not in (None, self.gpus):
            raise DistapError(f"--ranks {self.ranks}: --gpus {self.gpus} means one rank on each; leave it out")
        if self.ranks_a_host > MAX_RANKS:
            option = "--gpus" if self.gpus else "--ranks"
            raise DistapError(f"{option} {self.ranks_a_host}: {MAX_RANKS} ranks a host at most; take more --nodes")
        if self.cpu is not None and self.cpu < self.ranks_a_host:
            raise DistapError(f"--cpu {self.cpu}: less than a core for each of the host's {self.ranks_a_host} ranks")

    def _check_places(self) -> None:
        data, validation = self.data_claim, claim_of(self.validation, "--validation")
        if validation is not None and (data is None or data.name != validation.name):
            raise DistapError(
                f"--validation {self.validation}: expected a folder of the claim of --data ({self.data}), or a URL"
            )
        if self.run_claim is None and not _STORE.fullmatch(self.checkpoints):
            raise DistapError(
                f"--checkpoints {self.checkpoints}: expected pvc://CLAIM or pvc://CLAIM/FOLDER, of a claim that all "
                "pods can write to (ReadWriteMany), or an object store, such as s3://bucket/prefix or gs://bucket/prefix"
            )


@dataclass(frozen=True, kw_only=True)
class TaskRequest(PodRequest):
    """The options of `distap k8s task`; a DistapError names a wrong one."""

    data: Annotated[
        str | None, Option(help="Claim to mount at /data, pvc://CLAIM; only `data` commands may write to it.")
    ] = None
    runs: Annotated[str | None, Option(help="Claim to mount at /runs, pvc://CLAIM; `serve` only reads it.")] = None
    cpu: Annotated[int, Option(help="Cores of a pod.", min=1)] = 4
    memory: Annotated[str, Option(help="Memory of a pod.")] = "16Gi"
    restarts: Annotated[int, Option(help="New pods after failures before giving up.", min=0)] = 6
    replicas: Annotated[int, Option(help="Pods of `serve`.", min=1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        quantity_bytes(self.memory, "--memory")
        _ = self.claims

    @property
    def claims(self) -> dict[str, str]:
        """Names of claims by the volumes that mount them."""
        found = {}
        for volume, text in (("data", self.data), ("runs", self.runs)):
            if text is not None:
                claim = claim_of(text, f"--{volume}")
                if claim is None or claim.folder:
                    raise DistapError(
                        f"--{volume} {text}: expected pvc://CLAIM; the commands name folders of /{volume}"
                    )
                found[volume] = claim.name
        return found


def claim_of(text: str | None, option: str) -> Claim | None:
    if text is None or not text.startswith("pvc://"):
        return None
    name, _, folder = text.removeprefix("pvc://").partition("/")
    if not _SUBDOMAIN.fullmatch(name) or ".." in PurePosixPath(folder).parts or folder.startswith("/"):
        raise DistapError(f"{option} {text}: expected pvc://CLAIM, or pvc://CLAIM/FOLDER with a folder of the claim")
    return Claim(name, folder.rstrip("/"))


def _variable(text: str) -> tuple[str, str]:
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise DistapError(f"--env {text!r}: expected NAME=VALUE, the name of letters, digits and underscores")
    return match[1], match[2]


def parsed_image(text: str) -> dict[str, str | None]:
    """Return the `name`, `tag` and `digest` of a container image."""
    match = _IMAGE.fullmatch(text)
    if match is None:
        raise DistapError(f"--image {text!r}: expected NAME@sha256:DIGEST or NAME:TAG, the name in lower case")
    return match.groupdict()


def quantity_bytes(text: str, option: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise DistapError(f"{option} {text!r}: expected a number with a unit of Kubernetes, such as 64Gi")
    return int(match[1]) * _BYTES[match[2] or ""]
