"""The batch script on a real Slurm of one node, whose daemons run on this machine."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from launching import OF_JOBS, PATIENCE, ROOT, started
from servers import free_ports
from trainings import Run

from distap.errors import MISTAKE

SCRIPT = "launch/slurm/train.sbatch"
MUNGE = ("socket", "key-file", "pid-file", "seed-file")
SETTINGS = """\
ClusterName=distap-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={port}
SlurmdPort={next_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} CpuBind=core State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Call the programs of a cluster whose files are in `folder`."""

    def __init__(self, folder):
        self.folder = folder

    def call(self, *command, **environment):
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | environment
        done = subprocess.run(
            command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def submit(self, *arguments, **environment):
        """Queue the batch script; return the job's number and its log."""
        number = self.call(
            "sbatch",
            "--parsable",
            "--nodes=1",
            f"--output={self.folder}/%j.log",
            *arguments,
            **environment,
        )
        return number, self.folder / f"{number}.log"

    def wait_for(self, number, log, **words):
        """Wait until scontrol says so of a job."""
        self.wait_until(
            lambda: all(f" {name}={value} " in self.about(number) for name, value in words.items()),
            log,
        )

    def about(self, number):
        return self.call("scontrol", "show", "job", number, "--oneliner")

    def wait_until(self, holds, log, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while not holds():
            output = log.read_text() if log.exists() else "nothing"
            assert time.monotonic() < deadline, (
                f"not within {seconds} s: {output}\n{self.call('squeue')}"
            )
            time.sleep(0.1)


@pytest.fixture
def slurm(tmp_path):
    """A cluster of this machine, which is gone afterwards with its jobs."""
    missing = [
        name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None
    ]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root, slurmctld, slurmd and munge; missing: {', '.join(missing) or 'root'}"
        )
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    port = free_ports(2)
    host = socket.gethostname()
    (tmp_path / "slurm.conf").write_text(
        SETTINGS.format(
            host=host, folder=tmp_path, port=port, next_port=port + 1, cores=os.cpu_count()
        )
    )
    (tmp_path / "key-file").touch(0o400)
    (tmp_path / "key-file").write_bytes(secrets.token_bytes(1024))
    munged = [
        "munged",
        "--foreground",
        "--force",
        *(f"--{name}={tmp_path / name}" for name in MUNGE),
    ]
    cluster = Slurm(tmp_path)
    with ExitStack() as stack:
        # The socket of munge has to be there before the others ask for it.
        stack.enter_context(started(munged, tmp_path)).wait_until((tmp_path / "socket").exists)
        for daemon in (["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            job = stack.enter_context(
                started(daemon, tmp_path, SLURM_CONF=str(tmp_path / "slurm.conf"))
            )
        job.wait_until(lambda: "idle" in cluster.call("sinfo", "--noheader"))
        yield cluster
        for number in cluster.call("squeue", "--noheader", "--format=%i").split():
            cluster.call("scancel", "--full", "--signal=KILL", number)
            cluster.call("scancel", number)
        job.wait_until(lambda: not cluster.call("squeue", "--noheader"))


@pytest.mark.cluster
@pytest.mark.slow
def test_a_job_that_is_preempted_is_queued_again_and_goes_on_and_a_mistake_is_not(
    slurm, tmp_path, training_shards
):
    run = Run(tmp_path / "job", training_shards, steps=100_000)
    environment = OF_JOBS | {"PYTHON": sys.executable}
    number, log = slurm.submit(SCRIPT, str(run.config), **environment)
    slurm.wait_until(lambda: log.exists() and "step 3/" in log.read_text(), log)
    # to the launchers, as pre-emption and --signal do
    slurm.call("scancel", "--signal=TERM", number)
    slurm.wait_for(number, log, Restarts=1)
    assert "Exited with exit code 75" in log.read_text()
    # Slurm would wait two minutes; at once, the node still refuses the job that it has just ended.
    slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now+15")
    slurm.wait_until(lambda: "going on from" in log.read_text(), log)
    assert f"job {number}, start 2:" in log.read_text()
    slurm.call("scancel", "--full", "--signal=KILL", number)

    # The launcher gets all cores that were asked for.
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "threads: $OMP_NUM_THREADS"; exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    environment |= {"PYTHON": str(python), "OMP_NUM_THREADS": ""}
    cores = f"--cpus-per-task={os.cpu_count()}"
    number, log = slurm.submit(cores, SCRIPT, str(run.config), "no.such.key=1", **environment)
    slurm.wait_for(number, log, JobState="FAILED", ExitCode=f"{MISTAKE}:0", Restarts=0)
    assert f"threads: {os.cpu_count()}\n" in log.read_text()
