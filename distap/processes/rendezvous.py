"""How hosts of a training find each other at torchrun's rendezvous.

torch waits a minute or two, deaf to signals, and asks only once whether this machine is that host. That is too little
for pods: pulling another pod's image may take longer, and its name spreads over name servers with a delay.
"""

import itertools
import logging
import socket
import time
from argparse import Namespace
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.rendezvous import utils as rendezvous

from distap.errors import DistapError

C10D_PORT = 29400  # torchrun's default
JOIN_SECONDS = 600  # torchrun's default of join_timeout
PROBE_SECONDS = 1.0
logger = logging.getLogger("distap")


def await_meeting_point(settings: Namespace) -> None:
    """Wait until the host at torchrun's --rdzv-endpoint answers; return at once on that host itself.

    It also returns when join_timeout of --rdzv-conf is over, so that torch says what is wrong, and at once for other
    backends than c10d or if is_host says that this machine is the endpoint. If the endpoint is the beginning of this
    machine's full name, --rdzv-conf gets is_host=1. Settings that cannot be parsed raise a DistapError.
    """
    if settings.standalone or settings.rdzv_backend != "c10d" or not settings.rdzv_endpoint:
        return
    try:
        host, port = rendezvous.parse_rendezvous_endpoint(settings.rdzv_endpoint, C10D_PORT)
    except ValueError as error:
        where = f"--rdzv-endpoint {settings.rdzv_endpoint}"
        raise DistapError(f"{where}: expected HOST or HOST:PORT with a port from 0 to 65535: {error}") from error
    join_seconds, is_host = _configured(settings.rdzv_conf)
    if str(is_host).lower() in ("1", "true", "t", "yes", "y"):
        return
    started = time.monotonic()
    for probe in itertools.count():
        if answers(host, port) or time.monotonic() - started > join_seconds:
            return
        if is_host is None and _is_this_machine(host):
            # A name that other hosts share, such as localhost, must not make all of them take themselves for it.
            if socket.getfqdn().startswith(f"{host}."):
                settings.rdzv_conf = ",".join(filter(None, (settings.rdzv_conf, "is_host=1")))
            return
        if probe == 0:
            logger.warning("nobody answers at %s:%d yet: waiting for it, %d s at most", host, port, join_seconds)
        time.sleep(PROBE_SECONDS)


def who_came(handler: Any) -> str:
    """Say how many hosts, and which, came to a failed rendezvous of torch in which time."""
    state, settings = handler._state_holder.state, handler._settings
    if state.closed:
        return "another host has given up, and says who came"
    came = sorted({host.addr for host in (handler._this_node, *state.participants, *state.wait_list)})  # it has left
    seconds = settings.timeout.join.total_seconds()
    return f"{len(came)} of {settings.min_nodes} came within {seconds:g} s: {', '.join(came)}"


def answers(host: str, port: int) -> bool:
    """Tell whether a port at this address accepts connections."""
    with suppress(OSError):
        socket.create_connection((host, port), PROBE_SECONDS).close()
        return True
    return False


def _configured(text: str) -> tuple[int, str | None]:
    try:
        configured = rendezvous._parse_rendezvous_config(text)
    except ValueError as error:
        raise DistapError(f"--rdzv-conf {text}: expected KEY=VALUE,KEY=VALUE: {error}") from error
    given = configured.get("join_timeout", str(JOIN_SECONDS))
    if not given.isdecimal() or int(given) < 1:
        raise DistapError(f"--rdzv-conf {text}: join_timeout {given}: expected whole seconds, 1 or more")
    return int(given), configured.get("is_host")


def _is_this_machine(host: str) -> bool:
    with suppress(OSError):  # this machine's own name may not be known
        return rendezvous._matches_machine_hostname(host)  # as torch will ask
    return False
