"""distap's image, built and run by podman and runc, and Kubernetes pods as podman would run them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("podman", "runc", "debootstrap")
BASE = "localhost/debian:bookworm"
IMAGE = "localhost/distap:test"
ROOM = 30e9  # bytes that the image takes while it is built: the environment four times
# Neither a build nor a container may have more than the machine that this runs on, which podman would ask for.
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
        [found] = json.loads(self.call("inspect", "--type", kind, name))
        return dict(found)

    def build(self) -> None:
        """Make the image from the repository, on a base that Debian's packages make."""
        base = self.folder / "base.tar"
        _make_base(self.folder / "base", base)
        self.call("import", str(base), BASE)
        base.unlink()
        options = ["--isolation=chroot", LIMITS[0], "--layers=false", "--format=docker", f"--build-arg=BASE={BASE}"]
        options.append("--build-arg=EXTRAS=s3,gcs,http,cpu")  # a gigabyte less than for GPUs
        options += _pip_settings(self.folder)
        self.call("build", *options, "--file", "launch/container/Dockerfile", "--tag", IMAGE, str(ROOT), seconds=3600)

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
    missing = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, podman, runc and debootstrap; missing: {', '.join(missing) or 'root'}")
    if shutil.disk_usage(folder.parent).free < ROOM:
        pytest.skip(f"needs {ROOM / 1e9:.0f} GB of disk, under {folder.parent}")
    opened = Engine(folder)
    try:
        yield opened
    finally:
        opened.remove()


def options_of_pod(pod: Mapping[str, Any], volumes: Mapping[str, str]) -> list[str]:
    """podman's options for the only container of a pod, up to the image; then come the container's `args`.

    Args:
        pod: a pod's spec.
        volumes: what stands for its volumes, by name, such as a folder of this machine.
    """
    [container] = pod["containers"]
    whole, own = pod["securityContext"], container["securityContext"]
    assert whole["runAsNonRoot"] and whole["seccompProfile"] == {"type": "RuntimeDefault"}  # podman's default as well
    options = [f"--user={whole['runAsUser']}:{whole['runAsGroup']}"]
    options += [f"--cap-drop={capability}" for capability in own["capabilities"]["drop"]]
    options += ["--read-only", "--read-only-tmpfs=false"] if own["readOnlyRootFilesystem"] else []
    options += [] if own["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]
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
    mounted = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], capture_output=True)
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
        done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shutil.rmtree(folder)


def _pip_settings(folder: Path) -> Sequence[str]:
    """Options of a build that has pip find packages as it does here; none of it gets into the image."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in listed.stdout.splitlines())
    values = {name.split(".")[-1]: value.strip("'") for name, value in found.items()}
    mounts, settings = [], {"timeout": values.get("default-timeout", "60")}
    for name in ("index-url", "proxy", "trusted-host"):
        if name in values:
            settings[name] = values[name]
    if certificates := values.get("cert"):
        settings["cert"] = "/run/build/certificates.pem"
        mounts += [f"--volume={certificates}:{settings['cert']}:ro"]
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    return [*mounts, f"--volume={file}:/etc/pip.conf:ro"]
