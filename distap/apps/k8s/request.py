"""What `distap k8s render` is asked for, and what of it cannot be."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from distap.errors import DistapError

Kind = Literal["indexed-job", "jobset", "trainjob"]
MAX_RANKS = 16  # a host; the NetworkPolicy of k8s/base opens so many metrics ports
LONGEST_NAME = 63  # of a pod, and of a label's value
POD_SUFFIX = "-abcde"  # what Kubernetes appends to the names of pods
# How a kind names its pods, by the number of the host.
POD_NAMES: dict[Kind, str] = {
    "indexed-job": "{name}-{host}",
    "jobset": "{name}-node-0-{host}",
    "trainjob": "{name}-node-0-{host}",
}
SHARED_STORES = ("s3", "gs")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_NAMESPACE.pattern}(\.{_NAMESPACE.pattern})*")
_STORE = re.compile(rf"({'|'.join(SHARED_STORES)})://[^\s/?#]+(/[^\s?#]*)?")
_QUANTITY = re.compile(r"([1-9][0-9]*)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_IMAGE = re.compile(
    r"(?P<name>([^\s:@/]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*)(:(?P<tag>[\w][\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class Claim:
    """A folder of a PersistentVolumeClaim, written `pvc://CLAIM/FOLDER`."""

    name: str
    folder: str  # "" for all of it


@dataclass(frozen=True)
class Image:
    """A container image."""

    name: str
    tag: str | None
    digest: str | None


@dataclass(frozen=True)
class Request:
    """The options of a rendering.

    Args:
        name: of the training: its objects, the first part of its pods' names, and the folder of its run.
        kind: what runs it.
        image: of the container.
        nodes: hosts.
        gpus: of a host, one rank on each; 0 trains on CPUs.
        ranks: of a host without GPUs.
        data: where the shards are: `pvc://CLAIM/FOLDER` or a URL; None leaves the recipe's.
        validation: the same of data.validation.
        checkpoints: `pvc://CLAIM/FOLDER`, or the URL of an object store.
        namespace: of all objects; None leaves it to kubectl.
        queue: Kueue's; None queues nothing.
        secret: whose keys become environment variables, where it exists.
        monitoring: namespace whose Prometheus may read the metrics.
        cpu: cores that a host's pod requests; None follows from ranks and loader workers.
        memory: of a host's pod, such as 64Gi; None follows from the recipe.
        spool: of a host's pod, for pixels and cached shards; None follows from the recipe.
        priority: PriorityClass; None takes the cluster's default.
        runtime: where a TrainJob's runtime is.
    Raises:
        DistapError: an option is wrong; it is named.
    """

    name: str
    kind: Kind
    image: str
    checkpoints: str
    nodes: int = 1
    gpus: int = 0
    ranks: int | None = None
    data: str | None = None
    validation: str | None = None
    namespace: str | None = None
    queue: str | None = None
    secret: str = "distap-credentials"
    monitoring: str = "monitoring"
    cpu: int | None = None
    memory: str | None = None
    spool: str | None = None
    priority: str | None = None
    runtime: Literal["namespace", "cluster"] = "namespace"

    def __post_init__(self) -> None:
        self._check_names()
        self._check_counts()
        parsed_image(self.image)
        for option, text in (("--memory", self.memory), ("--spool", self.spool)):
            if text is not None:
                quantity_bytes(text, option)
        self._check_places()
        if self.runtime == "cluster" and self.kind != "trainjob":
            raise DistapError(
                f"--runtime cluster: --kind {self.kind} has no runtime; leave it out, or take --kind trainjob"
            )
        if self.runtime == "cluster" and self.namespace:
            raise DistapError(
                "--runtime cluster makes a ClusterTrainingRuntime, which is in no namespace: leave --namespace out "
                f"and apply with `kubectl apply --namespace {self.namespace} -k FOLDER`"
            )

    @property
    def ranks_a_host(self) -> int:
        """Processes of a host."""
        return self.gpus or self.ranks or 1

    @property
    def world(self) -> int:
        """Processes of the training."""
        return self.nodes * self.ranks_a_host

    def _check_names(self) -> None:
        pod = POD_NAMES[self.kind].format(name=self.name, host=self.nodes - 1) + POD_SUFFIX
        if not _LABEL.fullmatch(self.name):
            raise DistapError(
                f"--name {self.name!r}: expected lower-case letters, digits and dashes, beginning with a letter and "
                "not ending with a dash, since pods are found by it in the name service"
            )
        if len(pod) > LONGEST_NAME:
            excess = len(pod) - LONGEST_NAME
            raise DistapError(
                f"--name {self.name}: its pods would be called {pod}, which is longer than the {LONGEST_NAME} "
                f"characters that Kubernetes allows; make it {excess} shorter"
            )
        for option, text, form, characters in (
            ("--namespace", self.namespace, _NAMESPACE, "digits and dashes"),
            ("--monitoring", self.monitoring, _NAMESPACE, "digits and dashes"),
            ("--queue", self.queue, _SUBDOMAIN, "digits, dashes and dots"),
            ("--secret", self.secret, _SUBDOMAIN, "digits, dashes and dots"),
            ("--priority", self.priority, _SUBDOMAIN, "digits, dashes and dots"),
        ):
            if text is not None and not (form.fullmatch(text) and len(text) <= LONGEST_NAME):
                raise DistapError(
                    f"{option} {text!r}: expected a name of lower-case letters, {characters}, "
                    f"{LONGEST_NAME} characters at most"
                )

    def _check_counts(self) -> None:
        if self.nodes < 1 or self.gpus < 0 or (self.ranks is not None and self.ranks < 1):
            ranks = "" if self.ranks is None else f", --ranks {self.ranks}"
            raise DistapError(
                f"--nodes {self.nodes}, --gpus {self.gpus}{ranks}: expected a host or more, no negative number of "
                "GPUs, and a rank or more"
            )
        if self.gpus and self.ranks not in (None, self.gpus):
            raise DistapError(
                f"--ranks {self.ranks}: with --gpus {self.gpus} a host has one rank on each GPU; leave it out"
            )
        if self.ranks_a_host > MAX_RANKS:
            option = "--gpus" if self.gpus else "--ranks"
            raise DistapError(
                f"{option} {self.ranks_a_host}: {MAX_RANKS} ranks a host at most; take more hosts (--nodes)"
            )
        if self.cpu is not None and self.cpu < self.ranks_a_host:
            raise DistapError(f"--cpu {self.cpu}: less than a core for each of the host's {self.ranks_a_host} ranks")

    def _check_places(self) -> None:
        data, validation = claim_of(self.data, "--data"), claim_of(self.validation, "--validation")
        if validation is not None and (data is None or data.name != validation.name):
            raise DistapError(
                f"--validation {self.validation}: one claim is mounted, that of --data ({self.data}); expected a "
                "folder of it, or a URL"
            )
        if claim_of(self.checkpoints, "--checkpoints") is None and not _STORE.fullmatch(self.checkpoints):
            raise DistapError(
                f"--checkpoints {self.checkpoints}: expected pvc://CLAIM or pvc://CLAIM/FOLDER, of a claim that all "
                "pods can write to (ReadWriteMany), or an object store, such as s3://bucket/prefix or gs://bucket/prefix"
            )


def claim_of(text: str | None, option: str) -> Claim | None:
    """The claim that an option names; None where it names none."""
    if text is None or not text.startswith("pvc://"):
        return None
    name, _, folder = text.removeprefix("pvc://").partition("/")
    if not _SUBDOMAIN.fullmatch(name) or ".." in PurePosixPath(folder).parts or folder.startswith("/"):
        raise DistapError(f"{option} {text}: expected pvc://CLAIM, or pvc://CLAIM/FOLDER with a folder of the claim")
    return Claim(name, folder.rstrip("/"))


def parsed_image(text: str) -> Image:
    """The parts of an image's name."""
    match = _IMAGE.fullmatch(text)
    if match is None:
        raise DistapError(f"--image {text!r}: expected NAME@sha256:DIGEST or NAME:TAG, the name in lower case")
    return Image(match["name"], match["tag"], match["digest"])


def quantity_bytes(text: str, option: str) -> int:
    """Bytes that a quantity of Kubernetes stands for."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise DistapError(f"{option} {text!r}: expected a number with a unit of Kubernetes, such as 64Gi")
    return int(match[1]) * _BYTES[match[2] or ""]
