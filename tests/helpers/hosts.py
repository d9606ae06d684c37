"""Two hosts as network namespaces, with a cable between them that can be cut and mended."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
from sockets import Listening


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Hosts a and b, 10.77.0.1 and 10.77.0.2."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:6]
        self.names = [f"distap-{name}-a", f"distap-{name}-b"]
        self.cards = [f"d{name}a", f"d{name}b"]
        ip("netns", "add", self.names[0])

    def build(self) -> None:
        ip("netns", "add", self.names[1])
        ends = [
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            self.cards[1],
            "netns",
            self.names[1],
        ]
        ip("link", "add", self.cards[0], *ends)
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
            for link in ("lo", card):
                ip("-n", name, "link", "set", link, "up")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cards[0], "down")

    def mend(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cards[0], "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def on(self, number: int, command: Sequence[str]) -> list[str]:
        """What runs a command on host a (0) or b (1), whose names nobody can resolve."""
        host = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c"]
        return [*host, f'hostname host-{"ab"[number]} && exec "$@"', "sh", *command]

    def answering(self, number: int, sockets: Iterable[Listening]) -> set[Listening]:
        """Those that take a connection of a stranger on host a (0) or b (1)."""
        return set(filter(partial(self._takes, number), sockets))

    def _takes(self, number: int, where: Listening) -> bool:
        code = f"import socket; socket.create_connection({tuple(where)!r}, 5)"
        command = self.on(number, [sys.executable, "-S", "-c", code])
        return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Hosts that are gone afterwards; skips the test where there can be none."""
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
