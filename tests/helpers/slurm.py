"""A Slurm of one node, this machine: its real daemons, on free ports of the loopback interface."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

SETTINGS = """\
ClusterName=distap-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} CpuBind=core State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """What one does with it, as its user does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str, **environment: str) -> str:
        """Output of a command such as squeue, from the repository's root."""
        root = Path(__file__).parents[2]
        done = subprocess.run(
            command, env=self.environment | environment, cwd=root, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def submit(self, *arguments: str, **environment: str) -> tuple[str, Path]:
        """Number and log of a new job of one node, this machine; the arguments are sbatch's."""
        log = str(self.folder / "%j.log")
        number = self.call("sbatch", "--parsable", "--nodes=1", f"--output={log}", *arguments, **environment)
        return number, self.folder / f"{number}.log"

    def wait_until(self, holds: Callable[[], bool], log: Path, seconds: float = 90) -> None:
        """Wait for something that a job does."""
        deadline = time.monotonic() + seconds
        while not holds():
            said = log.read_text() if log.exists() else "nothing"
            assert time.monotonic() < deadline, f"not within {seconds} s: {said}\n{self.call('squeue')}"
            time.sleep(0.1)

    def about(self, number: str) -> dict[str, str]:
        """What scontrol knows of a job, by its names."""
        words = self.call("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def one_node(folder: Path) -> Iterator[Slurm]:
    """A cluster that is gone afterwards, with its jobs; skips the test where there can be none."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, slurmctld, slurmd and munge; missing: {', '.join(missing) or 'root'}")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.socket() as one, socket.socket() as other:
        for held in (one, other):
            held.bind(("127.0.0.1", 0))
        ports = [held.getsockname()[1] for held in (one, other)]
    settings = {"host": socket.gethostname(), "folder": folder, "ports": ports, "cores": os.cpu_count()}
    (folder / "slurm.conf").write_text(SETTINGS.format(**settings))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    slurm = Slurm(folder)
    munge = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file", "seed-file")
    ]
    with ExitStack() as stack:
        stack.enter_context(_running(["munged", "--foreground", "--force", *munge], slurm))
        # Its socket has to be there before the others ask for it.
        slurm.wait_until(lambda: (folder / "munge.socket").exists(), folder / "munged.log", 10)
        stack.enter_context(_running(["slurmctld", "-D", "-i"], slurm))
        stack.enter_context(_running(["slurmd", "-D"], slurm))
        stack.callback(_end_jobs, slurm)
        slurm.wait_until(lambda: "idle" in slurm.call("sinfo", "--noheader"), folder / "slurmctld.log", 30)
        yield slurm


def _end_jobs(slurm: Slurm) -> None:
    for number in slurm.call("squeue", "--noheader", "--format=%i").split():
        slurm.call("scancel", "--full", "--signal=KILL", number)
        slurm.call("scancel", number)
    slurm.wait_until(lambda: not slurm.call("squeue", "--noheader"), slurm.folder / "slurmd.log", 60)


@contextmanager
def _running(command: list[str], slurm: Slurm) -> Iterator[None]:
    with (slurm.folder / f"{command[0]}.log").open("w") as log:
        process = subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
