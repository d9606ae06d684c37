"""Bring the ranks together: all join within the time-out, or each raises an error that names the
missing ones.

torchrun's store outlives a restart of its ranks, with every key that dead ranks wrote, and its
agents disagree on the number of restarts once one of them was replaced. So rank 0 numbers the
attempts in the store itself; each rank answers to the newest number, and when all have answered,
rank 0 writes down who they are:

    distap/attempt      the number of the newest attempt
    distap/N/here/R     rank R's answer to attempt N
    distap/N/members    the processes of all ranks, by rank 0
"""

import errno
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from distap.errors import CollectiveError, DistapError, logger
from distap.processes.forks import in_daemon
from distap.processes.shared_values import SECRET, SharedValues, secret_of_run

NEWEST = "distap/attempt"  # key of the number of the newest attempt
POLL_SECONDS = 0.05
FEW_RANKS = 128  # more of them look into the store less often
LATE_SECONDS = 2.0  # beyond the time-out, before a call to the store counts as hanging
NAMED_RANKS = 8  # ranks that a message names


@dataclass(frozen=True)
class RankProcess:
    """A rank, and the process that it is."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)  # process ids come back

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


Members = list[RankProcess]  # in the order of ranks


@dataclass(frozen=True)
class Party:
    """All ranks, and the store at which they met."""

    store: Store  # without keys of earlier attempts
    members: Members
    address: str  # host:port of the store
    rank: int  # of this process
    serves: bool  # whether the store lives in this process
    secret: bytes = b""  # of the run, for `SharedValues`

    @property
    def scope(self) -> str:
        """Return a text that no other start, of this run or another, has for its shared values."""
        return " ".join(member.nonce for member in self.members)


def join(rank: int, size: int, timeout_seconds: float) -> Party:
    """Wait for all ranks at the store MASTER_ADDR:MASTER_PORT.

    Raises:
        CollectiveError: ranks are missing, or the store cannot be reached.
    """
    deadline = time.monotonic() + timeout_seconds
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    where = f"the store at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
    late = f"within {timeout_seconds:g} s"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    secret = secret_of_run()

    # Rank 0 may start later than the others, so they knock until its port is open, within the time
    # that all have. TCPStore itself waits up to twice the time-out for an open port, and then fails
    # in C++.
    while not serves:
        patience = max(deadline - time.monotonic(), 0.1)
        try:
            socket.create_connection((host, port), timeout=patience).close()
            break
        except OSError as error:
            if time.monotonic() + 2 * POLL_SECONDS > deadline:
                raise CollectiveError(
                    "ranks.store_unreachable",
                    f"{where} cannot be reached {late}: {error}; is its host up, and the port open"
                    " from here?",
                ) from error
        time.sleep(2 * POLL_SECONDS)

    def join_at_store() -> Party:
        listener = None
        if serves:
            # Without torchrun's names, any rank may be of another host.
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            listener = listening_socket(host, port, has_others=size > local_ranks)
        if rank == 0 and size > 1 and not secret and _is_exposed(serves, listener):
            logger.warning(
                "%s has no secret: whoever can reach it can end this training; set %s to one text"
                " on all hosts",
                where,
                SECRET,
            )
        try:
            server = TCPStore(
                host,
                port,
                is_master=serves,
                timeout=timedelta(seconds=max(deadline - time.monotonic(), 1)),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except DistError as error:
            raise CollectiveError(
                "ranks.store_unreachable",
                f"{where} cannot be opened: {str(error).splitlines()[0]}",
            ) from error
        # The time left to join is too short for later calls.
        server.set_timeout(timedelta(seconds=timeout_seconds))
        me = RankProcess(rank)
        store, members = gather_members(server, me, size, timeout_seconds, deadline, secret)
        return Party(store, members, f"{host}:{port}", rank, serves, secret)

    # A call to a store over a broken network never returns, whatever its time-out, so its thread is
    # abandoned.
    party = in_daemon(join_at_store, "distap-join")
    if not wait([party], deadline + LATE_SECONDS - time.monotonic()).done:
        raise CollectiveError(
            "ranks.store_unreachable",
            f"{where} did not answer {late}: the network to it is broken",
        )
    return party.result()


def _is_exposed(serves: bool, listener: socket.socket | None) -> bool:
    """Return whether other hosts can reach the store.

    torchrun's agent makes a store that listens at all addresses.
    """
    return not serves or (listener is not None and not _is_loopback(listener.getsockname()))


def listening_socket(host: str, port: int, has_others: bool = False) -> socket.socket | None:
    """Return a socket that listens at the address of this machine that `host` names.

    Torch's own listens at all.

    It listens at all addresses too if `host` names none of this machine, as behind a forwarded
    port, or if other hosts come and it is a name that stands for several addresses, or for a
    loopback address here, as Debian has it of a machine's own name. None if the port is in use: the
    store that uses it may be one of this process, which torch then shares.
    """
    for family, address in _addresses_of(host, port, has_others):
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
    logger.info(
        "%s (MASTER_ADDR) is no address of this host alone: the store listens at all of them", host
    )
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with suppress(OSError):
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    return None


def _addresses_of(
    host: str, port: int, has_others: bool
) -> Sequence[tuple[socket.AddressFamily, Any]]:
    """Return the family and address of each address at which the store may listen alone."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # a name that is not known yet
        return []
    addresses = [(family, address) for family, *_, address in entries]
    if not has_others:
        return addresses
    reachable = [entry for entry in addresses if not _is_loopback(entry[1])]
    # The other hosts may know another of several addresses than this one.
    if len({address[0] for _, address in reachable}) > 1:
        return []
    return addresses if host == "localhost" or _is_loopback((host,)) else reachable


def warn_of_loopback(members: Sequence[RankProcess]) -> None:
    """Warn if ranks of other hosts would connect to themselves.

    gloo gives other ranks the address to which this host's name resolves.
    """
    if len({member.host for member in members}) < 2 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:  # a name that nobody knows, which gloo reports
        return
    if _is_loopback((address,)):
        logger.warning(
            "this host calls itself %s, which is %s here: other hosts cannot reach it; set"
            " GLOO_SOCKET_IFNAME to the network card that leads to them (`ip route`)",
            name,
            address,
        )


def _is_loopback(address: Sequence[Any]) -> bool:
    """Return whether the first part of a socket's address is one that other hosts cannot reach."""
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except ValueError:  # a name
        return False


class _Attempt:
    """An attempt of all ranks to meet, which this rank answers: a store without other keys."""

    def __init__(self, server: Store, number: int, me: RankProcess, secret: bytes) -> None:
        self.number = number
        self.store = PrefixStore(f"distap/{number}", server)
        scope = f"attempt {number}"
        self.answers = SharedValues[RankProcess](RankProcess, self.store, secret, scope)
        self._members = SharedValues[Members](Members, self.store, secret, scope)
        self.answers.write(f"here/{me.rank}", me)

    def members(self) -> Members | None:
        # `check` answers at once, where `get` would wait for a missing key and hide who it is that
        # is missing.
        return self._members.read(["members"])[0]

    def write_members(self, keys: list[str]) -> None:
        """Write down who the ranks are, once all have answered under their `keys`."""
        if self.store.check(keys):
            ranks = [answer for answer in self.answers.read(keys) if answer is not None]
            if len(ranks) == len(keys):
                self._members.write("members", ranks)


def gather_members(
    server: Store,
    me: RankProcess,
    size: int,
    timeout_seconds: float,
    deadline: float,
    secret: bytes = b"",
) -> tuple[Store, Members]:
    """Return the store of the newest attempt and its ranks, once rank 0 has written them down.

    Raises:
        CollectiveError: ranks are missing at the `deadline`.
        DistapError: another rank expects another number of ranks.
    """
    is_first = me.rank == 0
    keys = [f"here/{rank}" for rank in range(size)]
    # Rank 0 counts up once, by 1. The others add 0, which reads the number: in a store that
    # outlives its ranks the first one that they find may be that of an attempt before, which
    # rank 0 is about to leave behind.
    attempt = _Attempt(server, server.add(NEWEST, int(is_first)), me, secret)
    while True:
        if is_first:
            attempt.write_members(keys)
        members = attempt.members()
        if members and me in members:  # or else they are of an earlier attempt
            if len(members) == size:
                return attempt.store, members
            raise DistapError(
                "ranks.sizes_differ",
                f"{me} was started as one of {size} ranks, {members[0]} as one of {len(members)}",
            )
        if time.monotonic() > deadline:
            raise CollectiveError(
                "ranks.missing", _why_not_met(attempt.answers, keys, timeout_seconds)
            )
        time.sleep(POLL_SECONDS * max(1, size / FEW_RANKS))
        newest = server.add(NEWEST, 0)
        if newest != attempt.number and not is_first:
            attempt = _Attempt(server, newest, me, secret)


def _why_not_met(
    answers: SharedValues[RankProcess], keys: Sequence[str], timeout_seconds: float
) -> str:
    """Return which ranks are missing, and which have answered without this run's secret."""
    ranks = answers.read(keys)
    # If all have answered, but are not written down, rank 0 is the one that is gone.
    missing = [rank for rank, answer in enumerate(ranks) if answer is None] or [0]
    foreign = [rank for rank in missing if answers.is_foreign(keys[rank])]
    joined = listed([answer for answer in ranks if answer is not None])
    message = (
        f"rank{'s' * (len(missing) > 1)} {listed(missing, ', ')} of {len(keys)} did not join within"
        f" {timeout_seconds:g} s; those that did: {joined}"
    )
    if foreign:
        message += (
            f"; rank {listed(foreign, ', ')} has answered with another secret: {SECRET} must be the"
            " same on all"
        )
    return message


def listed(items: Sequence[object], between: str = "; ") -> str:
    """Join the first NAMED_RANKS items, and the number of the others."""
    names = [str(item) for item in items[:NAMED_RANKS]]
    if len(items) > NAMED_RANKS:
        names.append(f"and {len(items) - NAMED_RANKS} more")
    return between.join(names)
