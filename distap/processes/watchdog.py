"""Find the rank that keeps a collective from finishing, report it on every rank, and end the
process.

A rank whose peer is stopped, stuck or cut off would wait in its collective until the process
group's time-out, and then know only that somebody did not answer. So every rank runs two threads:
one writes to the store once a second what the rank does, and looks there for a verdict; one
compares the age of open collectives with the time-out. When a collective is late or fails, the
first rank to claim the case reads what all others do. It sees who has left, whose heart stands
still and who has not begun the collective, and writes down the verdict. Then every process ends,
since a thread that waits in gloo cannot be interrupted.

    beat/R      what rank R does
    left        how many ranks have reported why they leave
    claim       the rank that works out the verdict
    verdict     its text, and the exit status of all ranks, never that of a finished training

Beats and verdicts are `SharedValues`: what a stranger writes there counts as missing.
"""

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from distap.errors import FAILED, CollectiveError, logger
from distap.processes.forks import start_daemon
from distap.processes.meeting import Party, listed
from distap.processes.shared_values import SharedValues, as_utf8
from distap.processes.verdicts import Beat, Case, Collective, Progress, Verdict

BEAT_SECONDS = 1.0
SILENT_BEATS = 3.0  # after which a rank or the store may be gone
# From the verdict to the end of the process, unless the main thread leaves by itself.
VERDICT_SECONDS = 5.0
# gloo, NCCL and the store raise plain RuntimeErrors, which these marks tell apart.
OF_THE_NETWORK = (
    "/gloo/",
    "NCCL error",
    "NCCL communicator",
    "Connection ",
    "Broken pipe",
    "imed out",
)


class Watchdog:
    """Watch the collectives of one rank until `stop`; each may take `timeout_seconds`."""

    def __init__(self, party: Party, timeout_seconds: float) -> None:
        self.party = party
        self.timeout_seconds = timeout_seconds
        self.verdict: str | None = None
        self._status = FAILED  # of the process after the verdict
        self._beat_seconds = min(BEAT_SECONDS, timeout_seconds / 10)
        self._silence = SILENT_BEATS * self._beat_seconds
        self._progress = Progress()
        self._case: Case | None = None

        self._others = [member for member in party.members if member.rank != party.rank]
        self._store = party.store.clone()  # a connection serves one call at a time
        self._store_heard = time.monotonic()
        self._store_error = ""
        self._beats = SharedValues[Beat](Beat, self._store, party.secret, party.scope)
        self._verdicts = SharedValues[Verdict](Verdict, self._store, party.secret, party.scope)

        self._awake = threading.Event()  # to look at the store at once
        self._leaving = threading.Event()  # this rank leaves
        self._stopped = threading.Event()  # the threads may end
        self._condemned = threading.Event()  # a verdict is known
        self._write_beat()
        self._beating = start_daemon(self._beat, "distap-beat")
        self._judging = start_daemon(self._judge, "distap-judge")

    def stop(self, error: BaseException | None = None) -> None:
        """Tell the other ranks why this rank leaves, and end the threads."""
        left = "finished" if error is None else as_utf8(f"{type(error).__name__}: {error}")
        self._progress.status = getattr(error, "status", FAILED)
        self._progress.left = left
        # A launcher stops all ranks when one has left with an error, so let the others first report
        # why they fail. The store ends with the process that serves it, so let the others first
        # read it.
        self._lingers = self.party.serves or error is not None
        self._leaving.set()
        self._awake.set()
        self._beating.join(2 * self._silence)
        self._stopped.set()
        self._condemned.set()
        self._judging.join(self._silence)

    @property
    def activity(self) -> tuple[str, float]:
        """Return what this rank does now, and for how many seconds."""
        return self._progress.activity, self._progress.seconds()

    def note(self, activity: str) -> None:
        self._progress.note(activity)

    @contextmanager
    def collective(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Watch the enclosed collective.

        Raise a CollectiveError if the network or another rank breaks it.

        Every rank enters the collectives in the same order.
        """
        if self.verdict is not None:
            raise self._condemnation()
        collective = self._progress.begin(name)
        try:
            yield
        except RuntimeError as error:
            if not is_of_the_network(error):
                raise
            self._open_case(f"{self._here(f': {name}')} failed", error=f"; {_first_line(error)}")
            self._condemned.wait()  # the judge sees to it that this ends
            raise self._condemnation() from error
        finally:
            # NCCL's call returns when the work is queued. An event behind it on the stream tells
            # when it is done, and asking the event, unlike waiting for it, cannot hang.
            if device is not None and device.type == "cuda":
                collective.done = torch.cuda.Event()
                collective.done.record(torch.cuda.current_stream(device))
            collective.returned = True

    def _condemnation(self) -> CollectiveError:
        error = CollectiveError("ranks.lost", self.verdict)
        error.status = self._status
        return error

    def _open_case(self, problem: str, late: Collective | None = None, error: str = "") -> None:
        if self._case is None:
            self._case = Case(problem, late, error)
        self._awake.set()

    def _condemn(self, verdict: str, status: int) -> None:
        if self.verdict is None:
            self._status = status
            self.verdict = verdict
        self._condemned.set()

    def _beat(self) -> None:
        """Exchange heartbeats with the store.

        Only this thread calls the store, since a call may never return.
        """
        while not self._leaving.is_set():
            try:
                self._write_beat()
                self._look()
                self._store_heard = time.monotonic()
                self._store_error = ""
            except RuntimeError as error:
                self._store_error = f": {_first_line(error)}"
            self._awake.wait(self._beat_seconds)
            self._awake.clear()
        with suppress(RuntimeError):
            self._say_farewell()

    def _write_beat(self) -> None:
        self._beats.write(f"beat/{self.party.rank}", self._progress.beat())

    def _say_farewell(self) -> None:
        self._write_beat()
        self._store.add("left", 1)
        deadline = time.monotonic() + self._silence
        while self._lingers and self.verdict is None and time.monotonic() < deadline:
            if self._store.add("left", 0) > len(self._others):
                break
            time.sleep(self._beat_seconds / 5)
            self._look()

    def _look(self) -> None:
        """Look for a verdict in the store; if this rank has claimed the case, work one out."""
        if self.verdict is not None:
            return
        [verdict] = self._verdicts.read(["verdict"])
        if verdict is not None:
            self._condemn(*verdict)
        elif self._case is not None:
            self._inquire(self._case)

    def _inquire(self, case: Case) -> None:
        # To read all heartbeats takes as many answers as there are ranks, so one rank reads them
        # for all: the first to claim the case. It may be lost itself, so later every rank may; the
        # first verdict in the store counts.
        me = str(self.party.rank)
        is_mine = time.monotonic() - case.opened >= 3 * self._silence
        if not is_mine and self._store.compare_set("claim", "", me) != me.encode():
            return
        beats = self._beats.read([f"beat/{other.rank}" for other in self._others])
        verdict = case.verdict(self._others, beats, self._beat_seconds, self._silence)
        if verdict is not None:
            self._condemn(*verdict)
            self._verdicts.propose("verdict", verdict)

    def _judge(self) -> None:
        while not self._condemned.wait(self._beat_seconds / 2):
            self._check_clock()
        if not self._stopped.is_set():
            self._end()

    def _check_clock(self) -> None:
        """Open a case if a time is over, and judge it alone if the store is out of reach.

        This takes local data only, since a call to the store over a broken network never returns.
        """
        now = time.monotonic()
        silent = now - self._store_heard
        late = self._progress.waiting()
        if late is not None and now - late.since > self.timeout_seconds:
            here = self._here(f": {late.name}")
            self._open_case(f"{here} did not finish within {self.timeout_seconds:g} s", late)
        elif silent > self.timeout_seconds:
            self._open_case(f"{self._here(f': {late.name}' if late else '')} cannot go on")

        # The case was opened so long ago that the store would have given a verdict.
        case = self._case
        if case and silent > self._silence and now - case.opened > 4 * self._silence:
            self._condemn(
                f"{case.problem}: the store at {self.party.address} has not answered for"
                f" {silent:.0f} s{self._store_error}: the network to it is broken, or the host that"
                f" serves it is down; nothing is known of {listed(self._others)}{case.error}",
                FAILED,
            )

    def _end(self) -> None:
        """Log the verdict, and end the process unless its main thread does.

        The main thread leaves by the error that `collective` raises. If it waits in gloo or NCCL it
        cannot, and no thread can interrupt it, so the process ends around it.
        """
        if not (self._case and self._case.error):  # or else the main thread raises it
            logger.error("%s", self.verdict)
            # Only of the rank that others wait for is it of interest where it stands.
            me = str(self.party.members[self.party.rank])
            if self._progress.waiting() is None and me in str(self.verdict):
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                where = "".join(traceback.format_stack(frame)[-4:])
                logger.error("%s was here when it was told:\n%s", self._here(), where)
        if not self._stopped.wait(VERDICT_SECONDS):
            os._exit(self._status)

    def _here(self, collective: str = "") -> str:
        return f"rank {self.party.rank}{collective} ({self._progress.activity})"


def is_of_the_network(error: BaseException) -> bool:
    """Return whether an error of torch comes from a failed rank or network."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in OF_THE_NETWORK)


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without torch's source location and gloo's advice."""
    line = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", line)[:300]
