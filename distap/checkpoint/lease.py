"""The lease of a run: only one training at a time writes into its folder and its store.

    RUN/lease.json, or lease.json in checkpoint.store      host, process and time of the training

Rank 0 creates the file, which only one of several trainings can, and renews it. A second training
is refused, unless the first is gone: its process on this host has ended, or it does not renew its
lease while the second waits. A person who knows that it is gone starts with --take-over.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

from distap.errors import DistapError, logger
from distap.storage.files import Storage
from distap.storage.remotes import MissingFileError
from distap.storage.texts import parsed_json

FILE = "lease.json"
RENEW_SECONDS = 20.0
STALE_RENEWALS = 3  # that a training has missed if it is gone
# After so long without a renewal nobody counts as training, even if clocks differ and a store was
# out of reach for a while.
ENDED_SECONDS = 6 * 3600.0
TAKE_OVER = "DISTAP_TAKE_OVER"  # set in the environment of all ranks by --take-over


class Lease:
    """Lock a run against other trainings, on rank 0.

    Args:
        key: name of the place in recipes.
        place: storage of the run's checkpoints.
        holder: name of the other process in errors.
        remedy: advice of errors if the other process is gone.
    """

    def __init__(
        self,
        key: str,
        place: Storage,
        holder: str = "training",
        remedy: str = "start this one with --take-over",
    ) -> None:
        self._key = key
        self._place = place
        self._holder = holder
        self._remedy = remedy
        self.problem = ""  # why this training may no longer write
        self._own: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": _process(os.getpid()),
            "training": uuid.uuid4().hex,
            "started": time.time(),
        }
        self._ended = Event()
        self._renewing = Thread(target=self._renew, name="distap-lease", daemon=True)

    def take(self) -> str:
        """Take the lease and return its name, once no other training holds it.

        Raises:
            DistapError: another training holds the lease, or it cannot be written.
        """
        while not self._create(FILE):
            self._displace()
        self._renewing.start()
        return str(self._own["training"])

    def require_writable(self) -> None:
        """Write a test file, and raise a DistapError if nobody could write a lease here."""
        self._create("dry-run")
        self._place.remove("dry-run")

    def _create(self, file: str) -> bool:
        try:
            return self._place.create(file, self._text())
        except MissingFileError as error:
            raise DistapError(
                "storage.no_bucket", f"{self._key}: {self._place.base}: its bucket does not exist"
            ) from error

    def require_seen(self, training: str) -> None:
        """Raise a DistapError unless rank 0 took its lease where this rank writes checkpoints."""
        if (_read(self._place) or {}).get("training") != training:
            raise DistapError(
                "run.places_differ",
                f"{self._key}: {self._place.base}: not the place of rank 0: all hosts need the same"
                " one",
            )

    def release(self) -> None:
        """Stop renewing the lease, and remove it."""
        self._ended.set()
        if self._renewing.is_alive():
            self._renewing.join(RENEW_SECONDS)
        with suppress(DistapError):
            if self._is_own(_read(self._place)):
                self._place.remove(FILE)

    def _displace(self) -> None:
        """Remove the lease of a training that has ended.

        Raises:
            DistapError: the training proves to run.
        """
        place = self._place
        other = _read(place)
        since = time.monotonic()
        while other is not None:
            now = _read(place)
            if now is None:
                return
            reason = self._why_gone(other, time.monotonic() - since)
            if reason:
                if now == other:  # no third training has been faster
                    text = "%s: taking over the lease of %s: %s"
                    logger.warning(text, place.base, _named(other), reason)
                    place.remove(FILE)
                return
            # A change of the file is surer than the time in it: two hosts' clocks may differ.
            if self._is_of_this_host(other) or now != other:
                raise DistapError(
                    "run.in_use",
                    f"{self._key}: {place.base}: another {self._holder} runs here: {_named(other)}."
                    f" Stop it or wait for its end, or choose another {self._key}; if you know that"
                    f" it is gone, {self._remedy}",
                )
            logger.info("%s: waiting to see whether %s still runs", place.base, _named(other))
            time.sleep(RENEW_SECONDS / 4)

    def _why_gone(self, other: Mapping[str, Any], watched_seconds: float) -> str:
        """Return why the holder of another lease must have ended; "" if it may still run."""
        if TAKE_OVER in os.environ:
            return "asked for by --take-over"
        if self._is_of_this_host(other):
            return "" if _process(other["pid"]) == other["process"] else "its process has ended"
        is_stale = watched_seconds > STALE_RENEWALS * RENEW_SECONDS
        return f"not renewed for {watched_seconds:.0f} s" if is_stale else ""

    def _is_of_this_host(self, other: Mapping[str, Any]) -> bool:
        return bool(other) and _are_of_one_host(other, self._own)

    def _is_own(self, lease: Mapping[str, Any] | None) -> bool:
        return lease is not None and lease.get("training") == self._own["training"]

    def _text(self) -> bytes:
        return json.dumps(self._own | {"renewed": time.time()}, indent=2).encode()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                other = _read(self._place)
                if other and not self._is_own(other):
                    self.problem = (
                        f"{self._key}: {self._place.base}: another training has taken over:"
                        f" {_named(other)}, since this one did not renew {FILE} in time; it goes on"
                        " alone"
                    )
                    return
                self._place.write(FILE, self._text())
            except DistapError as error:
                logger.warning("%s: the lease cannot be renewed: %s", self._place.base, error)


def why_live(place: Storage) -> str:
    """Return why a training may still write to a run's folder or store; "" if it has ended."""
    lease = _read(place)
    if lease is None:
        return ""
    if not lease:
        return f"its {FILE} is damaged, so nobody knows"
    if _are_of_one_host(lease, {"process": _process(os.getpid())}):
        is_running = _process(lease["pid"]) == lease["process"]
        return f"process {lease['pid']} of this host trains it" if is_running else ""
    silent = max(time.time() - lease.get("renewed", lease["started"]), 0)
    if silent > ENDED_SECONDS:
        return ""
    return f"{_named(lease)}, renewed its lease {timedelta(seconds=round(silent))} ago"


def _are_of_one_host(lease: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # Where there is no /proc both are "": then the other counts as one of another host.
    host = lease["process"].rpartition(" ")[0]
    return host == other["process"].rpartition(" ")[0] != ""


def _read(place: Storage) -> dict[str, Any] | None:
    """Return a lease; {} if it is damaged or half written, None if there is none."""
    try:
        lease = parsed_json(place.read_whole(FILE))
        return lease if lease.keys() >= {"host", "pid", "process", "training", "started"} else {}
    except MissingFileError:
        return None
    except (ValueError, AttributeError):
        return {}


def _named(lease: Mapping[str, Any]) -> str:
    if not lease:
        return "an unknown training"
    running = timedelta(seconds=round(max(time.time() - lease["started"], 0)))
    return f"host {lease['host']}, pid {lease['pid']}, started {running} ago"


def _process(pid: int) -> str:
    """Identify a process beyond its id: by boot, container and start time. "" if it has ended."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The program's name stands in parentheses and may hold some itself, so count from the last
        # one. Field 22 (see man proc_pid_stat) is the time of the start: a later process with this
        # id has another.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (
            "" if state in "ZX" else f"{boot} {Path('/proc/self/ns/pid').readlink()} {fields[18]}"
        )
    return ""
