import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager

import pytest
from launching import OF_JOBS, Job, launcher, started
from servers import free_ports
from torch.distributed.run import get_args_parser

from distap.errors import FINISHED, MISTAKE, RESTART, DistapError
from distap.processes.rendezvous import await_meeting_point
from distap.processes.roll_call import RankProcess, warn_of_loopback

# A pod's own /etc/hosts knows its full name; the one that the others use comes from the name server.
HOSTS = """127.0.0.1 localhost
127.0.0.2 emoji-0.emoji.research.svc.cluster.local emoji-0
127.0.0.2 emoji-0.emoji
"""
AS_A_POD = 'hostname emoji-0 && mount --bind "$1" /etc/hosts && shift && exec "$@"'
SAY = """
import sys
from torch.distributed.run import get_args_parser
from distap.processes.rendezvous import await_meeting_point
for endpoint in sys.argv[1:]:
    given = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-conf=join_timeout=9", "any"]
    settings = get_args_parser().parse_args(given)
    await_meeting_point(settings)
    print(settings.rdzv_conf)
"""
TORCHS_PATIENCE = "join_timeout=60,read_timeout=1"


def options(port: int, conf: str) -> str:
    return f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=meeting --rdzv-conf={conf}"


@pytest.mark.slow
def test_a_host_waits_for_the_one_at_which_all_meet(tmp_path):
    port = free_ports(1)
    first = launcher(options(port, f"{TORCHS_PATIENCE},is_host=0"), "finish", tmp_path)
    second = launcher(options(port, f"{TORCHS_PATIENCE},is_host=1"), "finish", tmp_path)
    with started(first, tmp_path / "first") as early:
        early.wait_until(lambda: f"nobody answers at 127.0.0.1:{port} yet" in early.said)
        with started(second, tmp_path / "second") as late:
            assert (early.status(), late.status()) == (FINISHED, FINISHED)


def test_a_host_that_waits_for_another_can_be_stopped(tmp_path):
    alone = launcher(options(free_ports(1), "is_host=0,join_timeout=600"), "finish", tmp_path)
    with started(alone, tmp_path) as job:
        job.wait_until(lambda: "nobody answers" in job.said)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.status(seconds=10) == RESTART


@pytest.mark.slow
def test_hosts_that_do_not_all_come_say_how_many_did_and_who(tmp_path):
    port = free_ports(1)
    three = options(port, "join_timeout=40,is_host={}").replace("--nnodes=2", "--nnodes=3")
    hosts = [
        launcher(f"{three.format(number)} --local-addr=127.0.0.{number + 1}", "finish", tmp_path) for number in (1, 0)
    ]
    with started(hosts[0], tmp_path / "first") as first, started(hosts[1], tmp_path / "second") as second:
        assert first.status() != FINISHED != second.status()
    told = r"the hosts did not meet: 2 of 3 came within 40 s.*127.0.0.1, 127.0.0.2"
    assert any(re.search(told, host.said) for host in (first, second)), first.said + second.said


@pytest.mark.slow
def test_a_host_that_waits_for_one_that_was_lost_can_be_stopped(tmp_path):
    port, kept = free_ports(1), tmp_path / "kept"
    kept.mkdir()

    def started_host(name: str, is_host: int) -> AbstractContextManager[Job]:
        patient = f"{options(port, f'is_host={is_host},join_timeout=600')} --max-restarts=3"
        return started(launcher(patient, "go_on", tmp_path), tmp_path / name, TMPDIR=str(kept))

    with started_host("one", 1) as one:
        with started_host("other", 0) as other:
            for rank in range(2):
                one.wait_until((tmp_path / f"step-{rank}").exists)
            other.process.kill()
        # What is left is the launcher and the server that forks its ranks.
        one.wait_until(lambda: len(one.left()) == 2 and not list(kept.glob("distap-outcomes-*/*")))
        os.kill(one.process.pid, signal.SIGTERM)
        assert one.status() == RESTART, one.said


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare, to have a host name"
)
def test_a_pod_that_knows_its_own_name_needs_no_second_answer_of_the_name_server(tmp_path):
    (tmp_path / "hosts").write_text(HOSTS)
    pod = ["unshare", "--uts", "--mount", "sh", "-c", AS_A_POD, "sh", str(tmp_path / "hosts")]
    port = free_ports(1)
    endpoints = [f"emoji-0.emoji:{port}", f"localhost:{port}"]
    done = subprocess.run(
        [*pod, sys.executable, "-c", SAY, *endpoints], env=os.environ | OF_JOBS, capture_output=True, text=True
    )
    # Several launchers may be at localhost: torch finds out which of them it is.
    assert done.stdout.split() == ["join_timeout=9,is_host=1", "join_timeout=9"], done.stderr


@pytest.mark.parametrize(
    ("endpoint", "conf", "reason"),
    [
        ("node:abc", "is_host=1", "--rdzv-endpoint node:abc: expected HOST or HOST:PORT"),
        ("node:70000", "join_timeout=9", "--rdzv-endpoint node:70000: expected HOST or HOST:PORT"),
        ("node", "join_timeout=abc", "join_timeout abc: expected whole seconds, 1 or more"),
        ("node", "join_timeout=0,is_host=1", "join_timeout 0: expected whole seconds, 1 or more"),
        ("node", "join_timeout", "--rdzv-conf join_timeout: expected KEY=VALUE"),
    ],
)
def test_a_meeting_point_that_cannot_be_read_is_a_mistake(endpoint, conf, reason):
    given = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}", "any"]
    with pytest.raises(DistapError) as raised:
        await_meeting_point(get_args_parser().parse_args(given))
    assert raised.value.status == MISTAKE
    assert reason in str(raised.value)


def test_hosts_meet_as_an_operator_tells_them_by_the_environment(tmp_path):
    """What Kubeflow Trainer sets, without any option: torchrun's static rendezvous."""
    told = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_ports(1)),
    }
    command = launcher("", "finish", tmp_path)
    with (
        started(command, tmp_path / "first", PET_NODE_RANK="0", **told) as first,
        started(command, tmp_path / "second", PET_NODE_RANK="1", **told) as second,
    ):
        assert (first.status(), second.status()) == (FINISHED, FINISHED)
    assert {path.name for path in tmp_path.glob("?.?")} == {"0.0", "1.0"}


def test_a_host_that_calls_itself_a_loopback_address_gets_a_hint_if_there_are_others(monkeypatch, caplog):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    here, there = RankProcess(0, "here"), RankProcess(1, "there")
    warn_of_loopback([here, RankProcess(1, "here")])
    assert not caplog.text
    warn_of_loopback([here, there])
    assert "which is 127.0.1.1: other hosts cannot reach it; set GLOO_SOCKET_IFNAME" in caplog.text
    caplog.clear()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    warn_of_loopback([here, there])
    assert not caplog.text
