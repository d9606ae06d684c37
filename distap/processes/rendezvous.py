"""Waiting for the host at which the others of a training meet.

torch waits a minute or two for it, deaf to signals, and asks only once whether this machine is that host. Both are
too little for pods: another's image may be pulled for longer, and its name is known only after a while, to one name
server sooner than to the next.
"""

import logging
import socket
import time
from argparse import Namespace

from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)

from distap.errors import DistapError

C10D_PORT = 29400  # torchrun's default
JOIN_SECONDS = 600  # torchrun's default of join_timeout
PROBE_SECONDS = 1.0
logger = logging.getLogger("distap")


def await_meeting_point(settings: Namespace) -> None:
    """Return once someone answers at torchrun's --rdzv-endpoint, or it is known to be this machine.

    Returns as well when join_timeout of --rdzv-conf is over, for torch to say what is wrong, and at once with another
    backend than c10d, or where is_host says that this machine is the endpoint.

    Args:
        settings: torchrun's; its rdzv_conf gets is_host=1 where the endpoint is the beginning of this machine's name.
    Raises:
        DistapError: the endpoint or the configuration cannot be read.
    """
    if settings.standalone or settings.rdzv_backend != "c10d" or not settings.rdzv_endpoint:
        return
    host, port = _endpoint(settings.rdzv_endpoint)
    join_seconds, is_host = _configured(settings.rdzv_conf)
    if str(is_host).lower() in ("1", "true", "t", "yes", "y"):
        return
    deadline = time.monotonic() + join_seconds
    has_said = False
    while not answers(host, port):
        if is_host is None and _is_this_machine(host):
            # Not where the name is also that of other launchers, such as localhost: all would take themselves for it.
            if socket.getfqdn().startswith(f"{host}."):
                settings.rdzv_conf = ",".join(filter(None, (settings.rdzv_conf, "is_host=1")))
            return
        if time.monotonic() > deadline:
            return
        if not has_said:
            logger.warning("nobody answers at %s:%d yet: waiting for it, %d s at most", host, port, join_seconds)
            has_said = True
        time.sleep(PROBE_SECONDS)


def answers(host: str, port: int) -> bool:
    """Whether someone accepts connections there."""
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _endpoint(text: str) -> tuple[str, int]:
    """Host and port."""
    try:
        return parse_rendezvous_endpoint(text, C10D_PORT)
    except ValueError as error:
        raise DistapError(
            f"--rdzv-endpoint {text}: expected HOST or HOST:PORT with a port from 0 to 65535: {error}"
        ) from error


def _configured(text: str) -> tuple[int, str | None]:
    """The join_timeout in seconds, and is_host where it is given."""
    try:
        configured = _parse_rendezvous_config(text)
    except ValueError as error:
        raise DistapError(f"--rdzv-conf {text}: expected KEY=VALUE,KEY=VALUE: {error}") from error
    given = configured.get("join_timeout", str(JOIN_SECONDS))
    if not given.isdecimal() or int(given) < 1:
        raise DistapError(f"--rdzv-conf {text}: join_timeout {given}: expected whole seconds, 1 or more")
    return int(given), configured.get("is_host")


def _is_this_machine(host: str) -> bool:
    """What torch will find when it asks the same."""
    try:
        return _matches_machine_hostname(host)
    except OSError:  # this machine's own name is not known
        return False
