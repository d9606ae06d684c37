"""How ranks meet in a store: all join within the time-out, or each raises an error that names the missing ones.

here/R     rank R and its process
members    those of all ranks, which rank 0 writes down once all are there: one question for each of the others
"""

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from distap.errors import CollectiveError
from distap.processes.daemon import in_daemon

POLL_SECONDS = 0.05
FEW_RANKS = 128  # more of them ask the store less often
LATE_SECONDS = 2.0  # beyond the time-out, before a call to the store counts as hanging
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class RankProcess:
    """A rank and its process."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Party:
    """The ranks that have joined."""

    store: Store  # without keys of ranks that torchrun has started before
    members: list[RankProcess]  # in the order of ranks
    address: str  # host:port of the store
    rank: int  # of this process
    serves: bool  # whether the store lives in this process


def join(rank: int, size: int, timeout_seconds: float) -> Party:
    """Wait for all ranks at the store that MASTER_ADDR and MASTER_PORT name; raise a CollectiveError without them."""
    deadline = time.monotonic() + timeout_seconds
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"{host}:{port}"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # torchrun's store outlives a restart of its ranks, with all that dead ranks wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not serves:
        _wait_for_server(host, port, timeout_seconds, deadline)

    def joined() -> Party:
        left = timedelta(seconds=max(deadline - time.monotonic(), 1))
        server = TCPStore(host, port, None, serves, left, wait_for_workers=False, multi_tenant=True)
        server.set_timeout(timedelta(seconds=timeout_seconds))  # what is left to join is too short for later
        store = PrefixStore(f"distap/{attempt}", server)
        members = _call_roll(store, RankProcess(rank), size, timeout_seconds, deadline)
        return Party(store, members, address, rank, serves)

    # A call to a store over a broken network never returns, whatever its time-out, so its thread is abandoned.
    party = in_daemon(joined, "distap-join")
    if not wait([party], deadline + LATE_SECONDS - time.monotonic()).done:
        late = f"did not answer within {timeout_seconds:g} s: the network to it is broken"
        raise CollectiveError(f"the store at {address} {late}")
    return party.result()


def warn_of_loopback(members: Sequence[RankProcess]) -> None:
    """Warn if other hosts' ranks would connect to themselves: gloo gives them the address of this host's name."""
    if len({member.host for member in members}) < 2 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):  # a name that nobody knows; gloo will say so
        name = socket.gethostname()
        if (address := socket.gethostbyname(name)).startswith("127."):
            hint = "set GLOO_SOCKET_IFNAME to the network card that leads to them (`ip route`)"
            logger.warning(
                "this host calls itself %s, which is %s: other hosts cannot reach it; %s", name, address, hint
            )


def _call_roll(
    store: Store, me: RankProcess, size: int, timeout_seconds: float, deadline: float
) -> list[RankProcess]:
    keys = [f"here/{rank}" for rank in range(size)]
    store.set(keys[me.rank], json.dumps(asdict(me)))
    while time.monotonic() < deadline:
        if me.rank == 0 and store.check(keys):
            members = map(json.loads, store.multi_get(keys))
            store.set("members", json.dumps([*members]))
        if store.check(["members"]):
            return [RankProcess(**member) for member in json.loads(store.get("members"))]
        time.sleep(POLL_SECONDS * max(1, size / FEW_RANKS))
    is_there = [store.check([key]) for key in keys]
    # If all are there and nobody has written them down, rank 0 is the one that is gone.
    missing = [str(rank) for rank in range(size) if not is_there[rank]] or ["0"]
    joined = [str(RankProcess(**json.loads(store.get(keys[rank])))) for rank in range(size) if is_there[rank]]
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {size}"
    raise CollectiveError(f"{ranks} did not join within {timeout_seconds:g} s; those that did: {', '.join(joined)}")


def _wait_for_server(host: str, port: int, timeout_seconds: float, deadline: float) -> None:
    """Wait until the store's port is open. TCPStore itself waits up to twice the time-out and fails in C++ frames."""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() + 2 * POLL_SECONDS > deadline:
                store = f"the store at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
                problem = f"cannot be reached within {timeout_seconds:g} s: {error}"
                raise CollectiveError(f"{store} {problem}; is its host up, and the port open from here?") from error
        time.sleep(2 * POLL_SECONDS)
