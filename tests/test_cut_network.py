"""Two hosts as network namespaces, with a cable between them that can be cut."""

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launching import Job, started
from trainings import Run

from distap.exits import FAILED
from distap.launcher import LEAVE_SECONDS
from distap.watchdog import LEAVE_SECONDS as RANK_LEAVES_SECONDS

TIMEOUT_SECONDS = 5
JOIN_SECONDS = 8
# As the launcher's docstring says, with as much again for slow machines.
BOUND_SECONDS = 2 * (TIMEOUT_SECONDS + RANK_LEAVES_SECONDS + LEAVE_SECONDS + TIMEOUT_SECONDS)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Hosts a and b, 10.77.0.1 and 10.77.0.2."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:6]
        self.names = [f"distap-{name}-a", f"distap-{name}-b"]
        self.cards = [f"d{name}a", f"d{name}b"]
        ip("netns", "add", self.names[0])

    def build(self) -> None:
        ip("netns", "add", self.names[1])
        ends = ["netns", self.names[0], "type", "veth", "peer", "name", self.cards[1], "netns", self.names[1]]
        ip("link", "add", self.cards[0], *ends)
        for number, (name, card) in enumerate(zip(self.names, self.cards, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", card)
            for link in ("lo", card):
                ip("-n", name, "link", "set", link, "up")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cards[0], "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @contextmanager
    def job(self, number: int, run: Run, options: str) -> Iterator[Job]:
        """The launcher on host a (0) or b (1), with one rank of a training."""
        address = f"10.77.0.{number + 1}"
        options = (
            "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29400 --rdzv-id=test "
            f"--rdzv-conf=is_host={1 - number},join_timeout={JOIN_SECONDS} --local-addr={address} {options}"
        )
        command = run.command(options, TIMEOUT_SECONDS)
        host = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c"]
        host += [f'hostname host-{"ab"[number]} && exec "$@"', "sh", *command]
        with started(host, run.folder.parent, **run.environment, GLOO_SOCKET_IFNAME=self.cards[number]) as job:
            yield job


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs root, ip (iproute2) and unshare")
    try:
        hosts = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.remove()


@pytest.mark.cluster
@pytest.mark.slow
def test_both_sides_of_a_cut_network_leave_within_the_bound(hosts, tmp_path, training_shards):
    options = "--max-restarts=1"
    run = Run(tmp_path, training_shards, steps=100_000, timeout_seconds=float(TIMEOUT_SECONDS))
    with hosts.job(0, run, options) as a, hosts.job(1, run, options) as b:
        a.wait_until(lambda: run.has_done(1))
        hosts.cut()
        # The side with the rendezvous waits for the other to come back, since ranks may be started again.
        assert a.status(BOUND_SECONDS + 2 * JOIN_SECONDS) == FAILED
        assert b.status(BOUND_SECONDS) == FAILED
        assert a.left() == b.left() == []
        where = r"rank \d: \w+ of [\w ]+ \(\w+ of step \d+\)"
        silent = rf"{where} did not finish within 5 s: rank \d \(host-b, pid \d+\) has not been heard of for \d+ s"
        assert re.search(silent, a.said), a.said
        cut_off = rf"{where} (did not finish within 5 s|cannot go on): the store at 10.77.0.1:\d+ has not answered"
        assert re.search(cut_off, b.said), b.said
        assert re.search(r"nothing is known of rank \d \(host-a, pid \d+\)", b.said), b.said
