"""Where the ranks' store listens, and what a stranger who reaches it can do."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from launching import launcher, started
from ranks import on_ranks
from servers import free_ports
from strangers import store_of, written_by_a_stranger
from torch.distributed import PrefixStore, TCPStore

from distap.errors import RESTART, CollectiveError
from distap.processes.meeting import RankProcess, join, listening_socket, warn_of_loopback
from distap.processes.shared_values import SharedValues, as_utf8

TWO = "--nproc-per-node=2"


def test_a_training_goes_on_whatever_a_stranger_writes_into_its_store(tmp_path):
    with started(launcher(TWO, "stop_when_asked", tmp_path), tmp_path) as job:
        job.wait_for_step(0, 1)
        store = store_of((tmp_path / "store").read_text())
        step = 1
        for key, values in written_by_a_stranger().items():
            for value in values:
                store.set(key, value)
                step += 60  # longer than it takes a rank to look at the store
                job.wait_for_step(0, step)
        os.kill(job.pid(1), signal.SIGTERM)
        assert (job.status(), job.left()) == (RESTART, [])
        assert "Traceback" not in job.said, job.said


def joined_alike(monkeypatch, secrets, timeout_seconds):
    """What two ranks of this process meet with, each with a secret of its own."""
    port = free_ports(1)
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    outcomes = []
    with ThreadPoolExecutor(2) as pool:
        for rank, secret in enumerate(secrets):
            # Each rank reads its secret before the next one changes the environment, which is that
            # of both.
            monkeypatch.setenv("DISTAP_SECRET", secret)
            outcomes.append(pool.submit(join, rank, 2, timeout_seconds))
            PrefixStore("distap/1", server).wait([f"here/{rank}"], timedelta(seconds=30))
    return [outcome.exception() or outcome.result() for outcome in outcomes]


def test_ranks_with_one_secret_meet(monkeypatch):
    first, second = joined_alike(monkeypatch, ["same", "same"], 30)
    assert first.members == second.members and len(first.members) == 2


def test_a_rank_with_another_secret_is_named_by_the_others(monkeypatch):
    first, second = joined_alike(monkeypatch, ["ours", "theirs"], 3)
    assert isinstance(first, CollectiveError) and isinstance(second, CollectiveError)
    assert "rank 1 has answered with another secret: DISTAP_SECRET" in str(first)
    assert "rank 0 has answered with another secret: DISTAP_SECRET" in str(second)


def test_a_value_counts_under_its_own_key_in_its_own_run_alone():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = SharedValues[str](str, store, b"secret", "run 1")
    ours.write("one", "text")
    assert ours.read(["one", "two"]) == ["text", None]
    store.set("two", store.get("one"))
    assert ours.read(["two"]) == [None]
    assert SharedValues[str](str, store, b"secret", "run 2").read(["one"]) == [None]
    assert SharedValues[str](str, store, b"another", "run 1").read(["one"]) == [None]


def test_a_proposal_takes_the_place_of_a_forged_value_but_not_of_a_valid_one():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = SharedValues[str](str, store, b"secret", "run 1")
    store.set("verdict", b"\xff forged")
    ours.propose("verdict", "first")
    ours.propose("verdict", "second")
    assert ours.read(["verdict"]) == ["first"]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_store_listens_at_the_address_that_is_named(name):
    with listening_socket(name, 0, has_others=True) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_store_listens_at_all_addresses_if_the_named_one_is_not_of_this_host():
    with listening_socket("192.0.2.77", 0, has_others=True) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_a_store_of_several_hosts_does_not_listen_at_the_loopback_address_of_its_own_name(
    monkeypatch,
):
    # As Debian has it: /etc/hosts maps a machine's own name to 127.0.1.1, which other hosts cannot
    # reach.
    of_name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: of_name)
    with listening_socket("host0", 0, has_others=True) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
    with listening_socket("host0", 0, has_others=False) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"


def test_a_store_of_several_hosts_listens_at_all_addresses_of_a_name_that_has_several(monkeypatch):
    of_name = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in ("192.0.2.1", "192.0.2.2")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: of_name)
    with listening_socket("host0", 0, has_others=True) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_a_farewell_may_name_a_file_in_another_encoding():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    values = SharedValues[str](str, store, b"secret", "run 1")
    values.write("left", as_utf8("DamagedImageError: caf\udce9.jpg"))
    assert values.read(["left"]) == ["DamagedImageError: caf\\udce9.jpg"]


def met_again(world, port):
    """Meet twice in one process, as two trainings one after the other do."""
    os.environ["MASTER_PORT"] = str(port)
    first = join(world.rank, world.size, 60)
    world.barrier()
    second = join(world.rank, world.size, 60)
    world.barrier()  # rank 0 serves the store, and must not leave before the other has met it
    return len(first.members), len(second.members)


def test_ranks_can_meet_again_at_the_same_port():
    port = free_ports(1)
    assert on_ranks(2, met_again, port) == [(2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("hosts", "interface", "warns"),
    [
        (("here", "there"), None, True),
        (("here", "here"), None, False),
        (("here", "there"), "eth1", False),
    ],
    ids=["several hosts", "one host", "an interface that is set"],
)
def test_a_host_that_calls_itself_a_loopback_address_is_told_if_there_are_others(
    monkeypatch, caplog, hosts, interface, warns
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    warn_of_loopback([RankProcess(rank, host) for rank, host in enumerate(hosts)])
    assert (
        "which is 127.0.1.1 here: other hosts cannot reach it; set GLOO_SOCKET_IFNAME"
        in caplog.text
    ) == warns
