"""Where the hosts of a training meet: a process of the launcher, which tells it the ranks and their store.

A call to a store over a broken network never returns. In a process of its own such a call hangs nobody: the launcher
waits for messages, keeps looking at its ranks and at signals, and kills this process in the end.

One host has nobody to meet; the process serves the ranks' store. Several hosts meet at --rdzv-endpoint by torch's
c10d rendezvous, which numbers those that come, and to which more may come later; or, without it, all meet at
--master-addr, each with its --node-rank.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from distap.errors import CollectiveError
from distap.processes.forks import die_with_parent, forking_context
from distap.processes.stopping import go_deaf

LOOPBACK = "127.0.0.1"
PORT, MASTER_PORT = 29400, 29500  # torchrun's defaults
PROBE_SECONDS = 1.0
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Hosts:
    """The hosts of a training, and how this one meets the others."""

    ranks: int  # on this host
    most: int  # hosts
    rendezvous: RendezvousParameters | None = None
    master: tuple[str, int] = (LOOPBACK, MASTER_PORT)
    node_rank: int = 0


@dataclass(frozen=True)
class Place:
    """The ranks of this host among all, and the address of their store."""

    first: int
    size: int
    address: str
    port: int
    is_served: bool = True  # or else rank 0 serves the store


class Meeting:
    """The launcher's side."""

    def __init__(self, hosts: Hosts) -> None:
        self._pipe, theirs = Pipe()
        self._process = forking_context().Process(target=_serve, args=(theirs, os.getpid(), hosts))
        self._process.start()
        theirs.close()

    def place(self, is_asked: Callable[[], bool]) -> Place | None:
        """Wait for the other hosts, and return where the ranks stand; None if `is_asked` to stop meanwhile."""
        while not is_asked():
            if self._pipe.poll(PROBE_SECONDS):
                try:
                    answer: Place | str = self._pipe.recv()
                except (EOFError, OSError):
                    answer = "the process that waits for the others was killed"
                if isinstance(answer, Place):
                    return answer
                raise CollectiveError(f"the hosts did not meet: {answer}")
        return None

    def others_wait(self) -> bool:
        """Tell once whether hosts have come that were not there when the ranks were started."""
        with suppress(EOFError, OSError):
            return self._pipe.poll() and self._pipe.recv() is None
        return False

    def end(self, has_finished: bool, seconds: float) -> None:
        """Tell the other hosts that this one has finished, or has failed for good, so that they leave too."""
        with suppress(OSError):
            self._pipe.send(has_finished)
            self._process.join(seconds)

    def close(self) -> None:
        """End the process; for other hosts this one is lost then, and may come back."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, launcher: int, hosts: Hosts) -> None:
    go_deaf()
    die_with_parent(launcher)
    if hosts.most == 1:
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        pipe.send(Place(0, hosts.ranks, LOOPBACK, store.port))
        pipe.recv()
    elif hosts.rendezvous is None:
        pipe.send(Place(hosts.node_rank * hosts.ranks, hosts.most * hosts.ranks, *hosts.master, is_served=False))
        pipe.recv()
    else:
        try:
            _meet(pipe, hosts.ranks, hosts.rendezvous)
        except (RendezvousError, ValueError) as error:
            pipe.send(str(error) or type(error).__name__)


def _meet(pipe: Connection, own_ranks: int, parameters: RendezvousParameters) -> None:
    """Meet the other hosts; then tell whether more have come, until the launcher ends."""
    join_seconds = parameters.get_as_int("join_timeout") or 0
    _await_endpoint(parameters, join_seconds)
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    store.set(f"distap/came/{store.add('distap/came', 1)}", parameters.local_addr or socket.gethostname())
    try:
        met = handler.next_rendezvous()
    except RendezvousTimeoutError:
        keys = [f"distap/came/{number + 1}" for number in range(store.add("distap/came", 0))]
        came = sorted({name.decode() for name in store.multi_get(keys)})
        few = f"{len(came)} of {parameters.min_nodes} came within {join_seconds} s: {', '.join(came)}"
        raise RendezvousError(few) from None
    except RendezvousClosedError:
        raise RendezvousError("another host has given up, and says who came") from None
    met.store.set(f"distap/ranks/{met.rank}", str(own_ranks))
    ranks = [int(met.store.get(f"distap/ranks/{host}")) for host in range(met.world_size)]
    at: Any = met.bootstrap_store_info
    pipe.send(Place(sum(ranks[: met.rank]), sum(ranks), at.master_addr, at.master_port, handler.use_agent_store))
    is_told = False
    while not pipe.poll(PROBE_SECONDS):
        with suppress(RendezvousError):  # if the network is broken, the ranks will notice
            if not is_told and handler.num_nodes_waiting() > 0:
                is_told = True
                pipe.send(None)
    with suppress(RuntimeError):  # the others have left already
        if pipe.recv():  # wait for them to finish too: one of them may serve the store
            met.store.add("distap/finished", 1)
            while met.store.add("distap/finished", 0) < met.world_size:
                time.sleep(PROBE_SECONDS / 10)
        handler.shutdown()


def _await_endpoint(parameters: RendezvousParameters, seconds: float) -> None:
    """Wait until somebody answers at the endpoint, and return at once if this machine is to serve it.

    torch waits a minute or two, and asks only once whether this machine is the endpoint. That is too little for pods:
    pulling another pod's image may take longer, and its name spreads over name servers with a delay.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint, PORT)
    is_host, started, is_told = parameters.get_as_bool("is_host"), time.monotonic(), False
    while not (is_host or _answers(host, port)):
        if is_host is None and is_this_machine(host):
            # A name that other hosts share, such as localhost, must not make all of them take themselves for it.
            if not host.startswith(("localhost", "127.")):
                parameters.config["is_host"] = "1"
            return
        if time.monotonic() - started > seconds:
            raise RendezvousError(f"nobody answers at {host}:{port} within {seconds} s")
        if not is_told:
            is_told = True
            logger.warning("nobody answers at %s:%d yet: waiting for it, %d s at most", host, port, seconds)
        time.sleep(PROBE_SECONDS)


def _answers(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), PROBE_SECONDS).close()
        return True
    return False


def is_this_machine(host: str) -> bool:
    """Tell whether a host is this machine, by its name, which name servers may not know yet, or its address."""
    name = socket.getfqdn()
    with suppress(OSError):
        if host in (name, socket.gethostname()) or name.startswith(f"{host}."):
            return True
        # Only an address of this machine can be bound.
        socket.create_server((socket.gethostbyname(host), 0)).close()
        return True
    return False
