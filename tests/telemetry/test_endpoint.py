import json
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from multiprocessing import active_children
from pathlib import Path

import pytest
from prometheus_client import Gauge
from servers import free_ports

import distap.telemetry.endpoint
from distap.data.shards.parallel import in_processes
from distap.errors import DistapError
from distap.telemetry.endpoint import Endpoint


@pytest.fixture
def endpoint():
    """A rank's, and its address."""
    port = free_ports(1)
    with Endpoint(rank=3).served(port, "127.0.0.1") as endpoint:
        yield endpoint, f"http://127.0.0.1:{port}"


def ask(url, method="GET", headers=None):
    """Status and content of the answer."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method=method, headers=headers or {}), timeout=10
        ) as answer:
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


def test_the_last_figures_wait_for_the_next_scrape_if_there_are_any(endpoint):
    rank, url = endpoint
    rank.wait_for_scrape(time.monotonic())  # nobody reads them
    ended = threading.Event()

    def scrape():
        while not ended.wait(0.05):
            ask(f"{url}/metrics")

    scraping = threading.Thread(target=scrape)
    scraping.start()
    while len(rank.scrapes) < 2:
        time.sleep(0.01)
    since = time.monotonic()
    rank.wait_for_scrape(since)
    assert rank.scrapes[-1] >= since
    ended.set()
    scraping.join()
    rank.wait_for_scrape(time.monotonic() - 60)  # they were read since then


def test_a_loader_worker_does_not_hold_the_port():
    port = free_ports(1)
    with Endpoint().served(port, "127.0.0.1"):
        answers = in_processes(str, range(9), workers=1)
        assert next(answers) == "0"
        [worker] = active_children()
        assert ask(f"http://127.0.0.1:{port}/healthz")[0] == 200
    with Endpoint().served(port, "127.0.0.1"):
        assert worker.is_alive()
        assert ask(f"http://127.0.0.1:{port}/healthz")[0] == 200
    answers.close()


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


# What a client sends first, and then again and again.
SLOW = {
    "nothing": (b"", b""),
    "half a header": (b"GET /metrics HTTP/1.1\r\nHost: local", b""),
    "a header byte by byte": (b"G", b"E"),
    "a header line by line": (b"GET /metrics HTTP/1.1\r\n", b"X: y\r\n"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SLOW)
def test_connections_without_a_whole_request_keep_no_probe_out_and_are_closed(
    endpoint, monkeypatch, name
):
    monkeypatch.setattr(distap.telemetry.endpoint, "REQUEST_SECONDS", 2.0)
    first, again = SLOW[name]
    with ExitStack() as idle:
        sockets = [idle.enter_context(connected(endpoint[1])) for _ in range(300)]
        for client in sockets:
            send(client, first)
        assert all(ask(f"{endpoint[1]}/healthz")[0] == 200 for _ in range(5))
        assert all(is_closed_while_sending(client, again) for client in sockets)


def test_many_connections_take_few_files_and_threads_of_the_training(endpoint):
    threads = threading.active_count()
    files = open_files()
    with ExitStack() as idle:
        for _ in range(300):
            idle.enter_context(connected(endpoint[1]))
        assert ask(f"{endpoint[1]}/readyz")[0] == 503  # it starts
        assert threading.active_count() - threads <= 64
        assert open_files() - files <= 300 + 65  # the clients' own, and one on its way


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9400", 200),
        ("10.1.2.3:9400", 200),  # a pod's address
        ("[fd00::1]:9400", 200),
        ("localhost", 200),
        ("LOCALHOST.:9400", 200),
        ("training:9400", 200),  # a service of compose or Kubernetes
        (socket.gethostname(), 200),
        (f"{socket.getfqdn()}:9400", 200),
        ("rebound.example", 400),
        ("rebound.example:9400", 400),
        ("127.0.0.1.rebound.example", 400),
        ("localhost.rebound.example", 400),
        ("rebound.example.", 400),
        ("[", 400),
    ],
)
def test_metrics_are_not_answered_to_a_page_of_another_site(endpoint, host, status):
    assert ask(f"{endpoint[1]}/metrics", headers={"Host": host})[0] == status
    assert ask(f"{endpoint[1]}/healthz", headers={"Host": host})[0] == 200  # probes ask by any name


def send(client, data):
    with suppress(ConnectionError):  # it is cut off already
        client.sendall(data)


def is_closed_while_sending(client, again):
    """Wait until a connection is closed, perhaps after an answer, and send `again` meanwhile."""
    try:
        while not select.select([client], [], [], 0.01)[0]:
            client.sendall(again)
        while client.recv(4096):
            pass
        return True
    except ConnectionError:
        return True


def connected(url):
    """A connection over which nothing has been sent."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1", "Address already in use"), ("192.0.2.1", "")]
)
def test_a_port_that_is_taken_or_an_address_of_another_host_is_named(endpoint, address, why):
    port = int(endpoint[1].rpartition(":")[2])
    message = rf"metrics\.port: cannot listen on {address}:{port}: {why}.*; choose another"
    with pytest.raises(DistapError, match=message), Endpoint().served(port, address):
        pass


def test_a_folder_for_the_metrics_of_other_programs_is_left_alone():
    count = (
        "import distap.telemetry.metrics, prometheus_client as p; p.Counter('a', 'b').inc();"
        " print('counted')"
    )
    environment = {"PROMETHEUS_MULTIPROC_DIR": "/nonexistent", "PYTHONPATH": ":".join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True).stdout
        == b"counted\n"
    )
