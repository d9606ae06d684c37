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
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from distap.errors import CollectiveError, DistapError, logger
from distap.processes.forks import in_daemon
from distap.processes.shared_values import SECRET, SharedValues, secret_of_run

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
    secret: bytes = b""  # of the run, for `SharedValues`

    @property
    def scope(self) -> str:
        """The processes that share values in the store: other starts, of this run or another, have
        others.
        """
        return " ".join(member.nonce for member in self.members)


def join(rank: int, size: int, timeout_seconds: float) -> Party:
    """Wait for all ranks at the store MASTER_ADDR:MASTER_PORT; raise a CollectiveError if some are
    missing.
    """
    deadline = time.monotonic() + timeout_seconds
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    where = f"the store at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
    late = f"within {timeout_seconds:g} s"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    secret = secret_of_run()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    # Rank 0 may start later than the others, so they knock until its port is open, within the time
    # that all have. TCPStore itself waits up to twice the time-out for an open port, and then fails
    # in C++.
    while not serves:
        try:
            socket.create_connection(
                (host, port), timeout=max(deadline - time.monotonic(), 0.1)
            ).close()
            break
        except OSError as error:
            if time.monotonic() + 2 * POLL_SECONDS > deadline:
                hint = "is its host up, and the port open from here?"
                raise CollectiveError(
                    f"{where} cannot be reached {late}: {error}; {hint}"
                ) from error
        time.sleep(2 * POLL_SECONDS)

    def joined() -> Party:
        left = timedelta(seconds=max(deadline - time.monotonic(), 1))
        has_others = size > 1 and (size > local_ranks or "LOCAL_WORLD_SIZE" not in os.environ)
        listener = listening_socket(host, port, has_others) if serves else None
        # torchrun's agent makes a store that listens at all addresses.
        is_open = not serves or (
            listener is not None and not _is_loopback(listener.getsockname()[0])
        )
        if rank == 0 and size > 1 and is_open and not secret:
            message = (
                "%s has no secret: whoever can reach it can end this training; set %s to one text"
                " on all hosts"
            )
            logger.warning(message, where, SECRET)
        descriptor = None if listener is None else listener.detach()
        try:
            server = TCPStore(
                host,
                port,
                is_master=serves,
                timeout=left,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=descriptor,
            )
        except DistError as error:
            raise CollectiveError(
                f"{where} cannot be opened: {str(error).splitlines()[0]}"
            ) from error
        # what is left to join is too short for later
        server.set_timeout(timedelta(seconds=timeout_seconds))
        store, members = _met(server, RankProcess(rank), size, timeout_seconds, deadline, secret)
        return Party(store, members, f"{host}:{port}", rank, serves, secret)

    # A call to a store over a broken network never returns, whatever its time-out, so its thread is
    # abandoned.
    party = in_daemon(joined, "distap-join")
    if not wait([party], deadline + LATE_SECONDS - time.monotonic()).done:
        raise CollectiveError(f"{where} did not answer {late}: the network to it is broken")
    return party.result()


def listening_socket(host: str, port: int, has_others: bool = False) -> socket.socket | None:
    """Return a socket that listens at the address of this machine that `host` names; torch's own
    listens at all.

    It listens at all addresses too if `host` names none of this machine, as behind a forwarded
    port, or if other hosts come and it is a name that stands for several addresses, or for a
    loopback address here, as Debian has it of a machine's own name. None if the port is in use: the
    store that uses it may be one of this process, which torch then shares.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # a name that is not known yet
        found = []
    # The other hosts may know another of several addresses than this one.
    if (
        has_others
        and len({str(address[0]) for *_, address in found if not _is_loopback(str(address[0]))}) > 1
    ):
        found = []
    is_loopback_named = host == "localhost" or _is_loopback(host)
    for family, _, _, _, address in found:
        if has_others and _is_loopback(str(address[0])) and not is_loopback_named:
            continue
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
    logger.info(
        "%s (MASTER_ADDR) is no address of this host alone: the store listens at all of them", host
    )
    is_dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    except OSError:
        return None


def warn_of_loopback(members: Sequence[RankProcess]) -> None:
    """Warn if ranks of other hosts would connect to themselves: gloo gives them the address of this
    host's name.
    """
    if len({member.host for member in members}) < 2 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:  # a name that nobody knows, which gloo will say
        return
    if _is_loopback(address):
        logger.warning(
            "this host calls itself %s, which is %s here: other hosts cannot reach it; set"
            " GLOO_SOCKET_IFNAME to the network card that leads to them (`ip route`)",
            name,
            address,
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def _met(
    server: Store,
    me: RankProcess,
    size: int,
    timeout_seconds: float,
    deadline: float,
    secret: bytes = b"",
) -> tuple[Store, list[RankProcess]]:
    """Return the store of the newest attempt and the ranks in it, once rank 0 has written them
    down.
    """
    keys = [f"here/{rank}" for rank in range(size)]
    attempt = answered = 0
    while True:
        # Rank 0 counts up once, by 1. The others add 0, which reads the number: in a store that
        # outlives its ranks the first one that they find may be that of an attempt before, which
        # rank 0 is about to leave behind.
        if me.rank != 0 or attempt == 0:
            attempt = server.add("distap/attempt", int(me.rank == 0))
        store = PrefixStore(f"distap/{attempt}", server)
        answers = SharedValues[RankProcess](RankProcess, store, secret, f"attempt {attempt}")
        written = SharedValues[list[RankProcess]](
            list[RankProcess], store, secret, f"attempt {attempt}"
        )
        if attempt != answered:
            answers.write(f"here/{me.rank}", me)
            answered = attempt
        if me.rank == 0 and store.check(keys):
            ranks = [answer for answer in answers.read(keys) if answer is not None]
            if len(ranks) == size:
                written.write("members", ranks)
        # `check` answers at once, where `get` would wait for a missing key and hide who it is that
        # is missing.
        [members] = written.read(["members"])
        if members and me in members:  # or else they are of an earlier attempt
            if len(members) != size:
                raise DistapError(
                    f"{me} was started as one of {size} ranks, {members[0]} as one of"
                    f" {len(members)}"
                )
            return store, members
        if time.monotonic() > deadline:
            raise CollectiveError(_why_not_met(store, answers, keys, timeout_seconds))
        time.sleep(POLL_SECONDS * max(1, size / FEW_RANKS))


def _why_not_met(
    store: Store, answers: SharedValues[RankProcess], keys: Sequence[str], timeout_seconds: float
) -> str:
    """Say which ranks are missing, and which have answered without this run's secret."""
    ranks = answers.read(keys)
    # If all have answered, but are not written down, rank 0 is the one that is gone.
    missing = [rank for rank, answer in enumerate(ranks) if answer is None] or [0]
    foreign = [rank for rank in missing if answers.is_foreign(keys[rank])]
    joined = listed([str(answer) for answer in ranks if answer is not None])
    message = f"rank{'s' * (len(missing) > 1)} {listed(missing, ', ')} of {len(keys)}"
    message += f" did not join within {timeout_seconds:g} s; those that did: {joined}"
    if foreign:
        message += (
            f"; rank {listed(foreign, ', ')} has answered with another secret: {SECRET} must be the"
            " same on all"
        )
    return message


def listed(items: Sequence[object], between: str = "; ") -> str:
    more = [f"and {len(items) - NAMED_RANKS} more"] if len(items) > NAMED_RANKS else []
    return between.join([*map(str, items[:NAMED_RANKS]), *more])
