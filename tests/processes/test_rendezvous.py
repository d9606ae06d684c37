import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from launching import OF_JOBS, launcher, started
from servers import free_ports

from distap.errors import FINISHED, MISTAKE, RESTART, DistapError
from distap.launcher import launch
from distap.processes.roll_call import RankProcess, warn_of_loopback

# A pod's own /etc/hosts knows its full name; the one that the others use comes from the name server.
HOSTS = """127.0.0.1 localhost
127.0.0.2 emoji-0.emoji.research.svc.cluster.local emoji-0
127.0.0.2 emoji-0.emoji
"""
AS_A_POD = 'hostname emoji-0 && mount --bind "$1" /etc/hosts && shift && exec "$@"'
SAY = """
import sys
from distap.processes.meeting import is_this_machine
print(*map(is_this_machine, sys.argv[1:]))
"""
TORCHS_PATIENCE = "join_timeout=60,read_timeout=1"


def options(port: int, conf: str) -> str:
    return f"--nnodes=2 --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=meeting --rdzv-conf={conf}"


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


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare, to have a host name"
)
def test_a_pod_that_knows_its_own_name_needs_no_second_answer_of_the_name_server(tmp_path):
    (tmp_path / "hosts").write_text(HOSTS)
    pod = ["unshare", "--uts", "--mount", "sh", "-c", AS_A_POD, "sh", str(tmp_path / "hosts")]
    names = ["emoji-0.emoji", "emoji-0", "127.0.0.2", "emoji-1.emoji", "10.255.255.1"]
    done = subprocess.run([*pod, sys.executable, "-c", SAY, *names], env=os.environ | OF_JOBS, capture_output=True)
    assert done.stdout.split() == [b"True", b"True", b"True", b"False", b"False"], done.stderr


@pytest.mark.parametrize(
    ("endpoint", "conf", "reason"),
    [
        ("node:abc", "is_host=1", "--rdzv-endpoint node:abc: "),
        ("node:70000", "join_timeout=9", "--rdzv-endpoint node:70000: "),
        ("node", "join_timeout=abc", "--rdzv-conf join_timeout=abc: "),
        ("node", "join_timeout=0,is_host=1", "join_timeout: expected whole seconds, 1 or more"),
        ("node", "is_host=perhaps", "--rdzv-conf is_host=perhaps: "),
    ],
)
def test_a_meeting_point_that_cannot_be_read_is_a_mistake(endpoint, conf, reason):
    with pytest.raises(DistapError) as raised:
        launch(["--nnodes=2", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}"], "launched", [], 5, 20)
    assert raised.value.status == MISTAKE
    assert reason in str(raised.value)


def test_hosts_meet_as_an_operator_tells_them_by_the_environment(tmp_path):
    """What Kubeflow Trainer sets, without any option: without a rendezvous."""
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
