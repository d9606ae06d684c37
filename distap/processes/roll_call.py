"""Roll call of the ranks: all join within the time-out, or each raises an error that names the missing ones.

torchrun's store outlives a restart of its ranks, with every key that dead ranks wrote, and its agents disagree on
the number of restarts once one of them was replaced. So rank 0 numbers the attempts in the store itself. Every living
rank that sees a new number answers to it; when all have answered, rank 0 writes down who they are:

    distap/attempt          the number of the newest attempt
    distap/N/here/R         rank R's answer to attempt N
    distap/N/result         rank 0's list of members, or an error
"""

import json
import logging
import os
import socket
import time
import uuid
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
    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)  # process ids come back

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Party:
    store: Store  # without keys of earlier attempts
    members: list[RankProcess]  # in the order of ranks
    address: str  # host:port of the store
    rank: int  # of this process
    serves: bool  # whether the store lives in this process


def join(rank: int, size: int, timeout_seconds: float) -> Party:
    """Wait for all ranks at the store MASTER_ADDR:MASTER_PORT; raise a CollectiveError if some are missing."""
    deadline = time.monotonic() + timeout_seconds
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"{host}:{port}"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait_for_server(host, port, timeout_seconds, deadline)

    def joined() -> Party:
        left = timedelta(seconds=max(deadline - time.monotonic(), 1))
        server = TCPStore(host, port, None, serves, left, wait_for_workers=False, multi_tenant=True)
        server.set_timeout(timedelta(seconds=timeout_seconds))  # what is left to join is too short for later
        attempt, members = _answer_roll_call(server, RankProcess(rank), size, timeout_seconds, deadline)
        return Party(PrefixStore(f"distap/{attempt}", server), members, address, rank, serves)

    # A call to a store over a broken network never returns, whatever its time-out, so its thread is abandoned.
    party = in_daemon(joined, "distap-join")
    if not wait([party], deadline + LATE_SECONDS - time.monotonic()).done:
        late = f"did not answer within {timeout_seconds:g} s: the network to it is broken"
        raise CollectiveError(f"the store at {address} {late}")
    return party.result()


def warn_of_loopback(members: Sequence[RankProcess]) -> None:
    """Warn if other hosts would connect to themselves, because gloo gives them this host's loopback address."""
    if len({member.host for member in members}) < 2 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):  # a name that nobody knows; gloo will say so
        name = socket.gethostname()
        if (address := socket.gethostbyname(name)).startswith("127."):
            hint = "set GLOO_SOCKET_IFNAME to the network card that leads to them (`ip route`)"
            logger.warning(
                "this host calls itself %s, which is %s: other hosts cannot reach it; %s", name, address, hint
            )


def _answer_roll_call(
    server: Store, me: RankProcess, size: int, timeout_seconds: float, deadline: float
) -> tuple[int, list[RankProcess]]:
    attempt = answered = 0
    if me.rank == 0:
        attempt = server.add("distap/attempts", 1)
        server.set("distap/attempt", str(attempt))
    while True:
        if me.rank != 0 and server.check(["distap/attempt"]):
            attempt = int(server.get("distap/attempt"))
        store = PrefixStore(f"distap/{attempt}", server)
        if attempt != answered:
            store.set(f"here/{me.rank}", json.dumps(asdict(me)))
            answered = attempt
        late = time.monotonic() > deadline
        if answered and (me.rank == 0 or late) and not store.check(["result"]):
            keys = [f"here/{rank}" for rank in range(size)]
            if late or store.check(keys):
                answers = [key for key in keys if store.check([key])] if late else keys
                present = [RankProcess(**json.loads(answer)) for answer in store.multi_get(answers)]
                error = _absent(size, present, timeout_seconds) if late else ""
                store.set("result", json.dumps({"members": [asdict(member) for member in present], "error": error}))
        if answered and store.check(["result"]):
            result = json.loads(store.get("result"))
            members = [RankProcess(**member) for member in result["members"]]
            if me in members:  # or else the result is an earlier attempt's
                if result["error"]:
                    raise CollectiveError(result["error"])
                return attempt, members
        if late:
            raise CollectiveError(_absent(size, [me], timeout_seconds))
        time.sleep(POLL_SECONDS * max(1, size / FEW_RANKS))


def _absent(size: int, present: Sequence[RankProcess], timeout_seconds: float) -> str:
    there = {member.rank for member in present}
    # If all have answered and there is still no result, rank 0 is the one that is gone.
    missing = [str(rank) for rank in range(size) if rank not in there] or ["0"]
    ranks, joined = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}", ", ".join(map(str, present))
    return f"{ranks} of {size} did not join within {timeout_seconds:g} s; those that did: {joined}"


def _wait_for_server(host: str, port: int, timeout_seconds: float, deadline: float) -> None:
    """Wait until the store's port is open; TCPStore itself waits up to twice the time-out and then fails in C++."""
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
