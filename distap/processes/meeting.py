"""Bring the ranks together: all join within the time-out, or each raises an error that names the missing ones.

torchrun's store outlives a restart of its ranks, with every key that dead ranks wrote, and its agents disagree on
the number of restarts once one of them was replaced. So rank 0 numbers the attempts in the store itself; each rank
answers to the newest number, and when all have answered, rank 0 writes down who they are:

    distap/attempt      the number of the newest attempt
    distap/N/here/R     rank R's answer to attempt N
    distap/N/members    the processes of all ranks, by rank 0
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from distap.errors import CollectiveError, DistapError
from distap.processes.forks import in_daemon

POLL_SECONDS = 0.05
FEW_RANKS = 128  # more of them ask the store less often
LATE_SECONDS = 2.0  # beyond the time-out, before a call to the store counts as hanging
NAMED_RANKS = 8  # ranks that a message names


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
    where, late = f"the store at {host}:{port} (MASTER_ADDR, MASTER_PORT)", f"within {timeout_seconds:g} s"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # Rank 0 may start later than the others, so they knock until its port is open, within the time that all have.
    # TCPStore itself waits up to twice the time-out for an open port, and then fails in C++.
    while not serves:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)).close()
            break
        except OSError as error:
            if time.monotonic() + 2 * POLL_SECONDS > deadline:
                hint = "is its host up, and the port open from here?"
                raise CollectiveError(f"{where} cannot be reached {late}: {error}; {hint}") from error
        time.sleep(2 * POLL_SECONDS)

    def joined() -> Party:
        left = timedelta(seconds=max(deadline - time.monotonic(), 1))
        try:
            server = TCPStore(host, port, None, serves, left, wait_for_workers=False, multi_tenant=True)
        except DistError as error:
            raise CollectiveError(f"{where} cannot be opened: {str(error).splitlines()[0]}") from error
        server.set_timeout(timedelta(seconds=timeout_seconds))  # what is left to join is too short for later
        store, members = _met(server, RankProcess(rank), size, timeout_seconds, deadline)
        return Party(store, members, f"{host}:{port}", rank, serves)

    # A call to a store over a broken network never returns, whatever its time-out, so its thread is abandoned.
    party = in_daemon(joined, "distap-join")
    if not wait([party], deadline + LATE_SECONDS - time.monotonic()).done:
        raise CollectiveError(f"{where} did not answer {late}: the network to it is broken")
    return party.result()


def _met(
    server: Store, me: RankProcess, size: int, timeout_seconds: float, deadline: float
) -> tuple[Store, list[RankProcess]]:
    """Return the store of the newest attempt and the ranks in it, once rank 0 has written them down."""
    keys = [f"here/{rank}" for rank in range(size)]
    attempt = answered = 0
    while True:
        # Rank 0 counts up once, by 1. The others add 0, which reads the number: in a store that outlives its ranks
        # the first one that they find may be that of an attempt before, which rank 0 is about to leave behind.
        if me.rank != 0 or attempt == 0:
            attempt = server.add("distap/attempt", int(me.rank == 0))
        store = PrefixStore(f"distap/{attempt}", server)
        if attempt != answered:
            store.set(f"here/{me.rank}", json.dumps(asdict(me)))
            answered = attempt
        if me.rank == 0 and store.check(keys):
            store.set("members", "\n".join(answer.decode() for answer in store.multi_get(keys)))
        # `check` answers at once, where `get` would wait for a missing key and hide who it is that is missing.
        if store.check(["members"]):
            members = [RankProcess(**json.loads(line)) for line in store.get("members").splitlines()]
            if me in members:  # or else they are of an earlier attempt
                if len(members) != size:
                    raise DistapError(
                        f"{me} was started as one of {size} ranks, {members[0]} as one of {len(members)}"
                    )
                return store, members
        if time.monotonic() > deadline:
            # If all have answered, but are not written down, rank 0 is the one that is gone.
            missing = [rank for rank in range(size) if not store.check([keys[rank]])] or [0]
            there = store.multi_get([keys[rank] for rank in range(size) if rank not in missing])
            joined = listed([str(RankProcess(**json.loads(answer))) for answer in there])
            ranks = f"rank{'s' * (len(missing) > 1)} {listed(missing, ', ')} of {size}"
            raise CollectiveError(f"{ranks} did not join within {timeout_seconds:g} s; those that did: {joined}")
        time.sleep(POLL_SECONDS * max(1, size / FEW_RANKS))


def listed(items: Sequence[object], between: str = "; ") -> str:
    more = [f"and {len(items) - NAMED_RANKS} more"] if len(items) > NAMED_RANKS else []
    return between.join([*map(str, items[:NAMED_RANKS]), *more])
