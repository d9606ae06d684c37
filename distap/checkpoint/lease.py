"""The lease of a run: one training at a time writes into its folder and its store.

RUN/lease.json      who trains here and when it said so last, also in checkpoint.store

Rank 0 takes the lease and renews it. A second training is refused, unless the first is gone: its process on this host
has ended, it was an earlier start of the same job of several hosts, or it has not renewed the lease for some time. A
person who knows more says so with --take-over.
"""

import json
import logging
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

from distap.errors import DistapError
from distap.processes.exit_statuses import JOB
from distap.storage.files import Storage
from distap.storage.remotes import MissingFileError, UnreachableError

FILE = "lease.json"
RENEW_SECONDS = 20.0
STALE_RENEWALS = 3  # that a training has missed if it is gone
FIELDS = {"host", "pid", "processes", "born", "job", "training", "started", "renewed"}
TAKE_OVER = "DISTAP_TAKE_OVER"  # set in the environment of all ranks by --take-over
_of_this_process: set[str] = set()  # trainings that run in it, for one that could not remove its lease
logger = logging.getLogger("distap")


class RunsHereError(DistapError):
    """Another training has the lease."""


class Lease:
    """The lease of one training, on rank 0.

    Args:
        places: the folder and the store of the run, by the recipe's keys.
    """

    def __init__(self, places: Mapping[str, Storage]) -> None:
        self._places = places
        self.problem = ""  # why this training may not write
        self._own: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": _process_table(),
            "born": _born(os.getpid()),
            "job": os.environ.get(JOB),
            "training": uuid.uuid4().hex,
            "started": time.time(),
        }
        self._ended = Event()
        self._renewing = Thread(target=self._renew, name="distap-lease", daemon=True)

    def require_free(self) -> None:
        """Raise a DistapError if a training on this host has the lease, before this one uses its GPU and memory."""
        for key, place in self._places.items():
            other = _read(place) or {}
            if self._is_of_this_host(other) and not self._gone(other, 0.0):
                raise _refusal(key, place, other)

    def take(self) -> None:
        """Take the lease, if need be after waiting to see whether another training renews it.

        Where nothing can be written, such as on a read-only disk, `require_held` raises later: a run whose steps are
        all done needs no lease.

        Raises:
            DistapError: another training has it, or the store cannot be reached.
        """
        try:
            for key, place in self._places.items():
                self._take(key, place)
        except BaseException as error:
            self._give_back()
            if not isinstance(error, DistapError) or isinstance(error, RunsHereError | UnreachableError):
                raise
            self.problem = str(error)
            return
        _of_this_process.add(self._own["training"])
        self._renewing.start()

    def require_held(self) -> None:
        """Raise a DistapError if another training has taken the lease over, or it could not be written."""
        if self.problem:
            raise DistapError(self.problem)

    def release(self) -> None:
        """Remove the lease and stop renewing it, if it was taken."""
        _of_this_process.discard(self._own["training"])
        self._ended.set()
        if self._renewing.ident is None:
            return
        self._renewing.join(RENEW_SECONDS)
        self._give_back()

    def _take(self, key: str, place: Storage) -> None:
        seen: dict[str, Any] = {}  # the first lease that was read
        since = time.monotonic()
        while not place.create(FILE, self._text()):
            other = _read(place)
            if other is None:  # it has just been removed
                continue
            if other.get("training") == self._own["training"]:  # the store is the run's folder
                return
            is_new = other.get("training") != seen.get("training")
            if is_new:
                seen, since = other, time.monotonic()
            if gone := self._gone(other, time.monotonic() - since):
                if _read(place) == other:  # and no other training has taken it over meanwhile
                    logger.warning("%s: taking over the lease of %s: %s", place.base, _named(other), gone)
                    place.remove(FILE)
            elif other != seen or self._is_of_this_host(other):
                raise _refusal(key, place, other)
            else:
                if is_new:
                    logger.info("%s: waiting to see whether %s still runs", place.base, _named(other))
                time.sleep(RENEW_SECONDS / 10)

    def _gone(self, other: dict[str, Any], watched_seconds: float) -> str:
        """Tell why the training of another lease is gone; empty if it may run."""
        if TAKE_OVER in os.environ:
            return "asked for by --take-over"
        if not other:
            return "it is damaged" if watched_seconds > RENEW_SECONDS / 2 else ""
        if self._is_of_this_host(other):
            runs = other["pid"] != os.getpid() or other["training"] in _of_this_process
            return "" if runs and _born(other["pid"]) == other["born"] else "its process has ended"
        if other["job"] is not None and other["job"] == self._own["job"]:
            return "it was an earlier start of this job"
        unrenewed, limit = time.time() - other["renewed"], STALE_RENEWALS * RENEW_SECONDS
        # The other host's clock may be slow, so a lease that looks old is watched for more than a renewal.
        is_old = unrenewed > limit and watched_seconds > 1.5 * RENEW_SECONDS
        is_gone = is_old or watched_seconds > limit
        return f"not renewed for {max(unrenewed, watched_seconds):.0f} s" if is_gone else ""

    def _is_of_this_host(self, other: dict[str, Any]) -> bool:
        return bool(other) and other["processes"] != "" and other["processes"] == self._own["processes"]

    def _text(self) -> bytes:
        return json.dumps(self._own | {"renewed": time.time()}, indent=2).encode()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            for key, place in self._places.items():
                try:
                    other = _read(place)
                    if other and other.get("training") != self._own["training"]:
                        taken = f"another training has taken over: {_named(other)}, since this one did not renew"
                        self.problem = f"{key}: {place.base}: {taken} {FILE} in time; it goes on alone"
                        return
                    place.write(FILE, self._text())
                except DistapError as error:
                    logger.warning("%s: the lease cannot be renewed: %s", place.base, error)

    def _give_back(self) -> None:
        for place in self._places.values():
            with suppress(DistapError):
                if (_read(place) or {}).get("training") == self._own["training"]:
                    place.remove(FILE)


def _read(place: Storage) -> dict[str, Any] | None:
    """Return a lease, {} if it is damaged or being written, None if there is none."""
    try:
        lease = json.loads(place.read_whole(FILE))
    except MissingFileError:
        return None
    except ValueError:
        return {}
    return lease if isinstance(lease, dict) and lease.keys() >= FIELDS else {}


def _refusal(key: str, place: Storage, other: dict[str, Any]) -> RunsHereError:
    return RunsHereError(
        f"{key}: {place.base}: another training runs here: {_named(other)}. Stop it or wait for its end, "
        f"or choose another {key}; if you know that it is gone, start this one with --take-over"
    )


def _named(lease: dict[str, Any]) -> str:
    if not lease:
        return "an unknown training"
    now = time.time()
    running, unrenewed = (timedelta(seconds=round(max(now - lease[name], 0))) for name in ("started", "renewed"))
    return f"host {lease['host']}, pid {lease['pid']}, started {running} ago, lease renewed {unrenewed} ago"


def _process_table() -> str:
    """Name the table of this process's id, that of a boot of the machine or of a container; empty if not known."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _born(pid: int) -> str:
    """Return when a process was started, which tells it from a later one of its id; empty if it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
