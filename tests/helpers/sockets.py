"""The TCP sockets at which processes listen, as `ss -ltnp` lists them."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

LISTENS = "0A"  # the state of such a socket in /proc/net/tcp


class Listening(NamedTuple):
    """Where a socket listens."""

    address: str
    port: int


def listening_sockets(pid: int) -> set[Listening]:
    """The sockets that a process holds, its own or inherited; none of a process that is gone."""
    process = Path("/proc", str(pid))
    try:
        inodes = {_link(entry) for entry in (process / "fd").iterdir()}
        rows = [
            line.split()
            for file in ("tcp", "tcp6")
            for line in (process / "net" / file).read_text().splitlines()[1:]
        ]
    except OSError:
        return set()
    return {
        _listening(local)
        for _, local, _, state, _, _, _, _, _, inode, *_ in rows
        if state == LISTENS and f"socket:[{inode}]" in inodes
    }


def sockets_of(pids: Iterable[int]) -> dict[int, set[Listening]]:
    """The sockets of several processes."""
    return {pid: listening_sockets(pid) for pid in pids}


def parent(pid: int) -> int:
    """The process that started another one; 0 if that is gone."""
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return 0
    return int(status.partition("PPid:")[2].split()[0])


def _link(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # closed meanwhile
        return ""


def _listening(local: str) -> Listening:
    """Read an address as the kernel writes it: words of four bytes, each in its own order."""
    digits, _, port = local.partition(":")
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    packed = b"".join(words)
    address = IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)
    return Listening(str(address), int(port, 16))
