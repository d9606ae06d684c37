import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client import Gauge
from servers import free_ports

import distap.telemetry.endpoint
from distap.errors import DistapError
from distap.telemetry.endpoint import Endpoint


@pytest.fixture
def endpoint():
    """A rank's, and its address."""
    port = free_ports(1)
    with Endpoint(rank=3).served(port, "127.0.0.1") as endpoint:
        yield endpoint, f"http://127.0.0.1:{port}"


def ask(url, method="GET"):
    """Status and content of the answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def test_a_rank_that_starts_is_healthy_but_not_ready(endpoint):
    _, url = endpoint
    status, text = ask(f"{url}/healthz")
    assert (status, json.loads(text)) == (200, {"rank": 3, "status": "healthy"})
    status, text = ask(f"{url}/readyz")
    assert (status, json.loads(text)) == (503, {"rank": 3, "status": "starting"})


def test_a_rank_is_ready_while_it_trains_and_is_not_to_stop(endpoint):
    rank, url = endpoint
    stopping = False
    with rank.ready(lambda: stopping):
        assert ask(f"{url}/readyz") == (200, '{"rank": 3, "status": "training"}\n')
        stopping = True
        assert ask(f"{url}/readyz") == (503, '{"rank": 3, "status": "stopping"}\n')
    assert ask(f"{url}/readyz") == (503, '{"rank": 3, "status": "finished"}\n')
    assert ask(f"{url}/healthz")[0] == 200


def test_a_rank_that_leaves_after_a_fault_says_which(endpoint):
    class Watched:
        verdict = "rank 3: gather did not finish within 5 s"
        activity = ("gather of step 7", 5.25)

    rank, url = endpoint
    rank.watchdog = Watched()
    status, text = ask(f"{url}/healthz")
    assert status == 503
    assert json.loads(text) == {
        "rank": 3,
        "status": "leaving after a fault",
        "activity": "gather of step 7",
        "seconds": 5.2,
        "fault": "rank 3: gather did not finish within 5 s",
    }


def test_metrics_that_come_later_are_answered(endpoint):
    rank, url = endpoint
    Gauge("late", "Defined after the endpoint was opened", registry=rank.registry).set(2)
    status, text = ask(f"{url}/metrics")
    assert status == 200 and "late 2.0" in text


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: local"])
def test_connections_without_a_whole_request_keep_no_probe_out_and_are_closed(endpoint, monkeypatch, sent):
    monkeypatch.setattr(distap.telemetry.endpoint.RequestHandler, "timeout", 2.0)
    with ExitStack() as idle:
        sockets = [idle.enter_context(connected(endpoint[1])) for _ in range(300)]
        for each in sockets:
            each.sendall(sent)
        assert all(ask(f"{endpoint[1]}/healthz")[0] == 200 for _ in range(5))
        assert all(each.recv(1) == b"" for each in sockets)


def connected(url):
    """A connection over which nothing has been sent."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize(("address", "why"), [("127.0.0.1", "Address already in use"), ("192.0.2.1", "")])
def test_a_port_that_is_taken_or_an_address_of_another_host_is_named(endpoint, address, why):
    port = int(endpoint[1].rpartition(":")[2])
    told = rf"metrics\.port: cannot listen on {address}:{port}: {why}.*; choose another"
    with pytest.raises(DistapError, match=told), Endpoint().served(port, address):
        pass


def test_a_folder_for_the_metrics_of_other_programs_is_left_alone():
    count = "import distap.telemetry.metrics, prometheus_client as p; p.Counter('a', 'b').inc(); print('counted')"
    environment = {"PROMETHEUS_MULTIPROC_DIR": "/nonexistent", "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True).stdout == b"counted\n"
