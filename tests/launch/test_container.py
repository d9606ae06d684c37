"""distap's image, really built, and run as the pods of an Indexed Job."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts import Hosts
from installing import pins
from launching import ROOT
from packaging.utils import canonicalize_name
from stores import list_checkpoints
from trainings import Run

from distap.errors import RESTART

pytestmark = [pytest.mark.container, pytest.mark.cluster, pytest.mark.slow]
NAME = "small"
TOOLS = ("podman", "runc", "debootstrap")
BASE = "localhost/debian:bookworm"
IMAGE = "localhost/distap:test"
ROOM = 30e9  # bytes that the image takes while it is built: the environment four times
# Neither a build nor a container may have more than the machine that this runs on, which podman
# would ask for.
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")


class Engine:
    """podman with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        # vfs works everywhere, but copies the whole image for each container.
        driver = "overlay" if _can_overlay(folder) else "vfs"
        runtime = ["--runtime", shutil.which("runc") or "runc", "--cgroup-manager", "cgroupfs"]
        # podman takes no path of more than 50 characters here, and pytest's own folders are longer.
        self._running = Path(tempfile.mkdtemp(prefix="podman-"))
        places = ["--root", str(folder / "storage"), "--runroot", str(self._running)]
        self._podman = ["podman", *places, "--storage-driver", driver, *runtime]

    def call(self, *arguments: str, seconds: float = 120) -> str:
        """What a podman command prints, on either channel."""
        environment = os.environ | {"TMPDIR": str(self.folder / "tmp")}
        done = subprocess.run(
            [*self._podman, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-4000:]}"
        return done.stdout.strip()

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        """What podman knows of an image or a container."""
        [actual] = json.loads(self.call("inspect", "--type", kind, name))
        return dict(actual)

    def build(self) -> None:
        """Make the image from the repository, on a base that Debian's packages make."""
        base = self.folder / "base.tar"
        _make_base(self.folder / "base", base)
        self.call("import", str(base), BASE)
        base.unlink()
        options = [
            "--isolation=chroot",
            LIMITS[0],
            "--layers=false",
            "--format=docker",
            f"--build-arg=BASE={BASE}",
        ]
        options.append("--build-arg=EXTRAS=s3,gcs,http,cpu")  # a gigabyte less than for GPUs
        options += _pip_settings(self.folder)
        self.call(
            "build",
            *options,
            "--file",
            "launch/container/Dockerfile",
            "--tag",
            IMAGE,
            str(ROOT),
            seconds=3600,
        )

    def remove(self) -> None:
        """Leave neither containers nor images, which are gigabytes."""
        for command in (["rm", "--all", "--force", "--time=0"], ["rmi", "--all", "--force"]):
            subprocess.run([*self._podman, *command], capture_output=True, check=False)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for folder in (self.folder, self._running):
            for mount in reversed([mount for mount in mounts if mount.startswith(str(folder))]):
                subprocess.run(["umount", "--lazy", mount], check=False)
            shutil.rmtree(folder)


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """podman, which has left nothing behind at the end; skips the test where it cannot run."""
    missing = [
        tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root, podman, runc and debootstrap; missing: {', '.join(missing) or 'root'}"
        )
    if shutil.disk_usage(folder.parent).free < ROOM:
        pytest.skip(f"needs {ROOM / 1e9:.0f} GB of disk, under {folder.parent}")
    opened = Engine(folder)
    try:
        yield opened
    finally:
        opened.remove()


def options_of_pod(pod: Mapping[str, Any], volumes: Mapping[str, str]) -> list[str]:
    """podman's options for the only container of a pod, up to the image; then come the container's
    `args`.

    Args:
        pod: a pod's spec.
        volumes: what stands for its volumes, by name, such as a folder of this machine.
    """
    [container] = pod["containers"]
    whole = pod["securityContext"]
    context = container["securityContext"]
    # podman's default as well
    assert whole["runAsNonRoot"] and whole["seccompProfile"] == {"type": "RuntimeDefault"}
    options = [f"--user={whole['runAsUser']}:{whole['runAsGroup']}"]
    options += [f"--cap-drop={capability}" for capability in context["capabilities"]["drop"]]
    options += (
        ["--read-only", "--read-only-tmpfs=false"] if context["readOnlyRootFilesystem"] else []
    )
    options += [] if context["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]
    options += [f"--env={entry['name']}={entry['value']}" for entry in container["env"]]
    options += [f"--memory={container['resources']['limits']['memory'].removesuffix('i').lower()}"]
    kinds = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        memory = kinds[mount["name"]].get("emptyDir", {})
        mode = "ro" if mount.get("readOnly") else "rw"
        if memory.get("medium") == "Memory":
            assert mount["mountPath"] == "/dev/shm"
            options += [f"--shm-size={memory['sizeLimit'].removesuffix('i').lower()}"]
        else:
            options += [f"--volume={volumes[mount['name']]}:{mount['mountPath']}:{mode}"]
    return options


def _can_overlay(folder: Path) -> bool:
    places = [folder / "tmp" / name for name in ("lower", "upper", "work", "merged")]
    for place in places:
        place.mkdir()
    lower, upper, work, merged = places
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], capture_output=True
    )
    if mounted.returncode == 0:
        subprocess.run(["umount", str(merged)], check=True)
    return mounted.returncode == 0


def _make_base(folder: Path, archive: Path) -> None:
    """What Debian's own image is made of."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    for command in (
        ["debootstrap", "--variant=minbase", "bookworm", str(folder)],
        ["tar", "--directory", str(folder), "--create", "--file", str(archive), "."],
    ):
        done = subprocess.run(
            command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.rmtree(folder)


def _pip_settings(folder: Path) -> Sequence[str]:
    """Options of a build that has pip find packages as it does here; none of it gets into the
    image.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    actual = dict(line.split("=", 1) for line in listed.stdout.splitlines())
    values = {name.split(".")[-1]: value.strip("'") for name, value in actual.items()}
    mounts = []
    settings = {"timeout": values.get("default-timeout", "60")}
    for name in ("index-url", "proxy", "trusted-host"):
        if name in values:
            settings[name] = values[name]
    certificates = values.get("cert")
    if certificates:
        settings["cert"] = "/run/build/certificates.pem"
        mounts += [f"--volume={certificates}:{settings['cert']}:ro"]
    file = folder / "pip.conf"
    file.write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    return [*mounts, f"--volume={file}:/etc/pip.conf:ro"]


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    with engine(tmp_path_factory.mktemp("engine") / "podman") as opened:
        opened.build()
        yield opened


class Pods:
    """The two pods of an Indexed Job, as containers on two hosts."""

    def __init__(
        self, podman: Engine, hosts: Hosts, folder: Path, built: str, shards: Path
    ) -> None:
        self.podman = podman
        self.hosts = hosts
        self.folder = folder
        objects = {
            (actual["kind"], actual["metadata"]["name"]): actual
            for actual in yaml.safe_load_all(built)
        }
        job = objects["Job", NAME]
        self.spec = job["spec"]["template"]["spec"]
        for entry in self.spec["containers"][0]["env"]:
            entry.setdefault(
                "value", job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/instance"]
            )
        [recipe] = [actual["data"] for (kind, _), actual in objects.items() if kind == "ConfigMap"]
        self.runs = folder / "runs"
        data = folder / "data"
        shutil.copytree(shards, data)
        data.chmod(0o755)  # pytest's own folders are root's alone
        for number in range(job["spec"]["completions"]):
            kept_names = {
                name: folder / f"{name}-{number}" for name in ("recipe", "spool", "tmp")
            } | {"runs": self.runs}
            for name, place in kept_names.items():
                place.mkdir(parents=True, exist_ok=True)
                if name != "recipe":
                    os.chown(place, -1, self.spec["securityContext"]["fsGroup"])
                    place.chmod(0o2775)
            for key, text in recipe.items():
                (kept_names["recipe"] / key).write_text(text)
            self._start(
                number,
                {"data": str(data), **{name: str(place) for name, place in kept_names.items()}},
            )

    def _start(self, number: int, volumes: dict[str, str]) -> None:
        """As the kubelet would, with the names that DNS and /etc/hosts would give."""
        [container] = self.spec["containers"]
        next(entry for entry in container["env"] if entry["name"] == "PET_NODE_RANK")["value"] = (
            str(number)
        )
        names = self.folder / f"hosts-{number}"
        whole = [f"{NAME}-{n}.{self.spec['subdomain']}.default.svc.cluster.local" for n in range(2)]
        lines = [
            f"127.0.0.1 localhost\n{self.hosts.addresses[number]} {whole[number]} {NAME}-{number}\n"
        ]
        for other, address in enumerate(self.hosts.addresses):
            lines += [f"{address} {whole[other]} {NAME}-{other}.{self.spec['subdomain']}\n"]
        names.write_text("".join(lines))
        place = [
            f"--name={NAME}-{number}",
            f"--hostname={NAME}-{number}",
            f"--volume={names}:/etc/hosts:ro",
        ]
        place += [f"--network=ns:/run/netns/{self.hosts.names[number]}"]
        # Timers for the health check would need systemd; the test asks itself.
        place += ["--detach", "--log-driver=k8s-file", "--no-healthcheck", *LIMITS]
        self.podman.call(
            "run", *place, *options_of_pod(self.spec, volumes), IMAGE, *container["args"]
        )

    def said(self, number: int) -> str:
        return self.podman.call("logs", f"{NAME}-{number}")

    def status_of_first_process(self, number: int) -> dict[str, str]:
        """What the kernel says of the container's process 1."""
        process = Path(
            "/proc", str(self.podman.inspect("container", f"{NAME}-{number}")["State"]["Pid"])
        )
        lines = [line.split(":\t", 1) for line in (process / "status").read_text().splitlines()]
        [root] = [fields for fields in _mounts(process / "mountinfo") if fields[4] == "/"]
        return dict(lines) | {"root": root[5].split(",")[0]}

    def wait_until(self, holds: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            output = "\n".join(self.said(number)[-4000:] for number in range(2))
            assert self.podman.call("ps", "--quiet").count("\n") == 1, f"one has ended: {output}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {output}"
            time.sleep(0.5)


def _mounts(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines()]


def answers(hosts: Hosts, number: int, url: str) -> str:
    """What a URL answers when the host asks for it."""
    program = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=10).read().decode())"
    asked = hosts.on(number, [sys.executable, "-c", program])
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def built_job(run: Run, folder: Path) -> str:
    """A copy of the CPU overlay, edited as k8s/README.md says: a name, two hosts, memory,
    recipe."""
    shutil.copytree(ROOT / "k8s", folder / "k8s")
    overlay = folder / "k8s/overlays/cpu"
    settings = overlay / "training/kustomization.yaml"
    text = settings.read_text()
    for before, after in (
        ("instance: emoji", f"instance: {NAME}"),
        ('PET_NNODES, value: "1"', 'PET_NNODES, value: "2"'),
        ("memory: 16Gi", "memory: 8Gi"),
    ):
        assert before in text
        text = text.replace(before, after)
    settings.write_text(text)
    recipe = yaml.safe_load(run.config.read_text())
    recipe["data"] |= {"train": "/data/train", "validation": "/data/test"}
    (overlay / "training/recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = ["kubectl", "kustomize", str(overlay)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return built.replace("$(PET_RDZV_ID)", NAME)  # as the kubelet does


def test_two_containers_train_with_the_arguments_of_the_jobs_own_manifest(
    podman, hosts, tmp_path, training_shards
):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the manifest")
    job = built_job(Run(tmp_path, training_shards, steps=100_000), tmp_path)
    pods = Pods(podman, hosts, tmp_path, job, training_shards[0].parent)
    pods.wait_until(lambda: "step 3/" in pods.said(0) + pods.said(1))

    for number in range(2):
        process = pods.status_of_first_process(number)
        assert process["Uid"].split() == process["Gid"].split() == ["10001"] * 4
        assert {process[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
            "0" * 16
        }
        assert (process["NoNewPrivs"], process["Seccomp"], process["root"]) == ("1", "2", "ro")
        for port in (9400, 9401):
            rank = f"http://{hosts.addresses[number]}:{port}"
            metrics = answers(hosts, 1 - number, f"{rank}/metrics")
            assert 'distap_stage_duration_seconds_count{stage="replay"}' in metrics
            for path in ("healthz", "readyz"):
                answers(hosts, 1 - number, f"{rank}/{path}")
        kind, *check = podman.inspect("image", IMAGE)["Healthcheck"]["Test"]
        assert kind == "CMD"
        podman.call("exec", f"{NAME}-{number}", *check)

    names = [f"{NAME}-{number}" for number in range(2)]
    podman.call("kill", "--signal=TERM", *names)
    statuses = podman.call("wait", *names, seconds=pods.spec["terminationGracePeriodSeconds"])
    assert statuses.split() == [str(RESTART)] * 2, pods.said(0) + pods.said(1)
    newest = list_checkpoints(pods.runs / NAME / "checkpoints")[-1]
    assert newest.stat().st_uid == 10001


def test_the_image_holds_no_tools_to_build_with(podman):
    alone = [
        "--rm",
        "--network=none",
        "--no-healthcheck",
        *LIMITS,
        "--read-only",
        "--entrypoint=sh",
    ]
    tools = "for tool in gcc g++ cc make pip pip3 git; do command -v $tool; done"
    privileged = "find / -xdev -perm /6000 -type f 2>/dev/null"
    assert podman.call("run", *alone, IMAGE, "-c", f"{tools}; {privileged}; true") == ""
    assert (
        podman.inspect("image", IMAGE)["Labels"]["org.opencontainers.image.licenses"]
        == "Apache-2.0"
    )


def test_the_image_lists_what_is_in_it(podman):
    alone = [
        "--rm",
        "--network=none",
        "--no-healthcheck",
        *LIMITS,
        "--read-only",
        "--entrypoint=cat",
    ]
    bill = json.loads(podman.call("run", *alone, IMAGE, "/opt/distap/sbom.cdx.json"))
    listed = {
        canonicalize_name(package["name"]): package["version"] for package in bill["components"]
    }
    locked = pins("core", "s3", "gcs", "http", "cpu")
    assert "torch" in locked and {name: listed.get(name) for name in locked} == locked
