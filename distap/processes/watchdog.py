"""Find the rank that keeps a collective from finishing, report it on every rank, and end the
process.

A rank whose peer is stopped, stuck or cut off would wait in its collective until the process
group's time-out, and then know only that somebody did not answer. So every rank runs two threads:
one writes to the store once a second what the rank does, and looks there for a verdict; one
compares the age of open collectives with the time-out. When a collective is late or fails, the
first rank to claim the case reads what all others do. It sees who has left, whose heart stands
still and who has not begun the collective, and writes down the verdict. Then every process ends,
since a thread that waits in gloo cannot be interrupted.

    beat/R      what rank R does left        how many ranks have said why they leave claim       the
    rank that works out the verdict verdict     its text, and the exit status of all ranks, which is
    never that of a finished training

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
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field

from distap.errors import FAILED, MISTAKE, CollectiveError, logger
from distap.processes.forks import start_daemon
from distap.processes.meeting import Party, RankProcess, listed
from distap.processes.shared_values import SharedValues, as_utf8

BEAT_SECONDS = 1.0
SILENT_BEATS = 3.0
# from the verdict to the end of the process, unless the main thread leaves by itself
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


@dataclass
class Collective:
    """A collective operation that this rank has started."""

    name: str
    number: int  # the same on every rank
    since: float
    returned: bool = False
    done: torch.cuda.Event | None = None  # a GPU's collective returns before it is done

    def is_over(self) -> bool:
        return self.returned and (self.done is None or self.done.query())


@dataclass(frozen=True)
class Beat:
    """Hold what a rank does, by its own clock, or why it has left."""

    time: float
    begun: int  # collectives
    doing: str
    seconds: float  # for which it has been doing this
    left: str | None = None
    status: int | None = None


Verdict = tuple[str, Annotated[int, Field(ge=FAILED, le=MISTAKE)]]  # text and status


class Watchdog:
    """Watch the collectives of one rank until `stop`; each may take `timeout_seconds`."""

    def __init__(self, party: Party, timeout_seconds: float) -> None:
        self.party = party
        self.timeout_seconds = timeout_seconds
        self.verdict: str | None = None
        self._status = FAILED  # with which to end after the verdict
        self._beat_seconds = min(BEAT_SECONDS, timeout_seconds / 10)
        # after which a rank or the store may be gone
        self._silence = SILENT_BEATS * self._beat_seconds
        self._activity = "start"
        self._active_since = time.monotonic()
        self._begun = 0  # collectives
        self._open: list[Collective] = []
        # Why this rank cannot go on, since when, the collective that is late, and the error of one
        # that failed.
        self._problem = ""
        self._opened = float("inf")
        self._error = ""
        self._late: Collective | None = None
        self._first_look: tuple[float, list[Beat | None]] | None = None  # at what the others do
        self._store_heard = time.monotonic()
        self._store_error = ""
        # Set to look at the store at once; when this rank leaves; when its threads may end; once a
        # verdict is known.
        self._awake, self._leaving, self._stopped, self._condemned = (
            threading.Event() for _ in range(4)
        )
        self._others = [member for member in party.members if member.rank != party.rank]
        self._store = party.store.clone()  # a connection serves one call at a time
        self._beats = SharedValues[Beat](Beat, self._store, party.secret, party.scope)
        self._verdicts = SharedValues[Verdict](Verdict, self._store, party.secret, party.scope)
        self._tell()
        self._beating = start_daemon(self._beat, "distap-beat")
        self._judging = start_daemon(self._judge, "distap-judge")

    def stop(self, error: BaseException | None = None) -> None:
        """Tell the other ranks why this rank leaves, and end the threads."""
        self._farewell = (
            "finished" if error is None else as_utf8(f"{type(error).__name__}: {error}")
        )
        self._farewell_status = getattr(error, "status", FAILED)
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
        return self._activity, time.monotonic() - self._active_since

    def note(self, activity: str) -> None:
        self._activity = activity
        self._active_since = time.monotonic()

    @contextmanager
    def collective(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Watch the enclosed collective; raise a CollectiveError if the network or another rank
        breaks it.

        Every rank enters the collectives in the same order.
        """
        if self.verdict is not None:
            raise self._condemnation()
        # Every rank counts alike, so the number of the late one tells which ranks have not come to
        # it yet.
        self._begun += 1
        collective = Collective(name, self._begun, time.monotonic())
        self._open.append(collective)
        try:
            yield
        except RuntimeError as error:
            if not is_of_the_network(error):
                raise
            self._open_case(f"{self._here(name)} failed", error=f"; {_first_line(error)}")
            self._condemned.wait()  # the judge sees to it that this ends
            raise self._condemnation() from error
        finally:
            # NCCL's call returns when the work is queued. An event behind it on the stream tells
            # when it is done, and asking the event, unlike waiting for it, cannot hang.
            if device is not None and device.type == "cuda":
                collective.done = torch.cuda.Event()
                collective.done.record(torch.cuda.current_stream(device))
            collective.returned = True
            self._open = [one for one in self._open if not one.is_over()]

    def _condemnation(self) -> CollectiveError:
        error = CollectiveError(self.verdict)
        error.status = self._status
        return error

    def _open_case(self, problem: str, late: Collective | None = None, error: str = "") -> None:
        if not self._problem:
            self._problem = problem
            self._late = late
            self._error = error
            self._opened = time.monotonic()
        self._awake.set()

    def _condemn(self, verdict: str, status: int) -> None:
        if self.verdict is None:
            self._status = status
            self.verdict = verdict
        self._condemned.set()

    def _beat(self) -> None:
        """Exchange heartbeats with the store; only this thread calls the store, since a call may
        never return.
        """
        while not self._leaving.is_set():
            try:
                self._tell()
                self._look()
                self._store_heard = time.monotonic()
                self._store_error = ""
            except RuntimeError as error:
                self._store_error = f": {_first_line(error)}"
            self._awake.wait(self._beat_seconds)
            self._awake.clear()
        # A launcher stops all ranks when one has left with an error, so let the others first say
        # why they fail. The store ends with the process that serves it, so let the others first
        # read what it says.
        deadline = time.monotonic() + self._silence
        with suppress(RuntimeError):
            self._tell(left=self._farewell, status=self._farewell_status)
            self._store.add("left", 1)
            while self._lingers and self.verdict is None and time.monotonic() < deadline:
                if self._store.add("left", 0) > len(self._others):
                    break
                time.sleep(self._beat_seconds / 5)
                self._look()

    def _tell(self, left: str | None = None, status: int | None = None) -> None:
        activity, seconds = self.activity
        doing = ", waiting in ".join([activity, *(one.name for one in self._open[:1])])
        beat = Beat(
            time=time.time(),
            begun=self._begun,
            doing=doing,
            seconds=seconds,
            left=left,
            status=status,
        )
        self._beats.write(f"beat/{self.party.rank}", beat)

    def _look(self) -> None:
        """Look for a verdict, or find one if this rank has claimed the case; after a while, any
        rank may.
        """
        [verdict] = self._verdicts.read(["verdict"]) if self.verdict is None else [None]
        if verdict is not None:
            self._condemn(*verdict)
        if self.verdict is not None or not self._problem:
            return
        # To read all heartbeats takes as many answers as there are ranks, so one rank reads them
        # for all: the first to claim the case. It may be lost itself, so later every rank may; the
        # first verdict in the store counts.
        me = str(self.party.rank)
        now = time.monotonic()
        if (
            now - self._opened < 3 * self._silence
            and self._store.compare_set("claim", "", me) != me.encode()
        ):
            return
        beats = self._beats.read([f"beat/{other.rank}" for other in self._others])
        # A rank is silent if nothing of what it wrote has changed between two looks. Times that
        # other hosts wrote are compared with nothing of ours: clocks differ.
        since, before = self._first_look = self._first_look or (now, beats)
        # Whoever left says so at once, and the others' hearts must have time to beat.
        is_late = now - since > self._silence + self._beat_seconds
        if is_late or any(beat is not None and beat.left is not None for beat in beats):
            stands_still = [
                is_late and beat == old for beat, old in zip(beats, before, strict=True)
            ]
            found = filter(None, map(self._problem_of, self._others, beats, stands_still))
            otherwise = (
                "every rank has begun it, so one may hang in it, or the network between them is"
                " broken"
            )
            text = as_utf8(f"{self._problem}: {listed(list(found)) or otherwise}{self._error}")
            # A mistake that a person must mend is one on every host, so that none of them starts
            # again.
            is_mistake = any(beat is not None and beat.status == MISTAKE for beat in beats)
            self._condemn(text, MISTAKE if is_mistake else FAILED)
            self._verdicts.propose("verdict", (text, MISTAKE if is_mistake else FAILED))

    def _problem_of(self, other: RankProcess, beat: Beat | None, stands_still: bool) -> str | None:
        if beat is None:
            return f"{other} has not been heard of" if stands_still else None
        if beat.left is not None:
            return f"{other} left: {beat.left}"
        if stands_still:  # the clock of its host may be wrong, so this time is but a hint
            quiet = max(time.time() - beat.time, self._silence)
            return f"{other} has not been heard of for {quiet:.0f} s; it was in {beat.doing}"
        if self._late is not None and beat.begun < self._late.number:
            return (
                f"{other} has not reached it; it has been in {beat.doing} for {beat.seconds:.0f} s"
            )
        return None

    def _judge(self) -> None:
        """Watch the clock with local data only, since a call to the store over a broken network
        never returns.
        """
        while not self._condemned.wait(self._beat_seconds / 2):
            now = time.monotonic()
            silent = now - self._store_heard
            late = next((one for one in self._open if not one.is_over()), None)
            if late is not None and now - late.since > self.timeout_seconds:
                self._open_case(
                    f"{self._here(late.name)} did not finish within {self.timeout_seconds:g} s",
                    late,
                )
            elif silent > self.timeout_seconds:
                self._open_case(f"{self._here(late.name if late else '')} cannot go on")
            # The case was opened so long ago that the store would have given a verdict: it is out
            # of reach, and this rank has to judge by what it knows alone.
            if silent > self._silence and now - self._opened > 4 * self._silence:
                store = (
                    f"the store at {self.party.address} has not answered for {silent:.0f}"
                    f" s{self._store_error}"
                )
                lost = "the network to it is broken, or the host that serves it is down"
                unknown = f"nothing is known of {listed(self._others)}"
                self._condemn(f"{self._problem}: {store}: {lost}; {unknown}{self._error}", FAILED)
        if self._stopped.is_set():
            return
        if not self._error:  # or else the main thread raises it
            logger.error("%s", self.verdict)
            # Only of the rank that others wait for is it of interest where it stands.
            if not self._open and str(self.party.members[self.party.rank]) in (self.verdict or ""):
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                where = "".join(traceback.format_stack(frame)[-4:])
                logger.error("%s was here when it was told:\n%s", self._here(), where)
        # The main thread leaves by the error that `collective` raises. If it waits in gloo or NCCL
        # it cannot, and no thread can interrupt it, so the process ends around it.
        if not self._stopped.wait(VERDICT_SECONDS):
            os._exit(self._status)

    def _here(self, collective: str = "") -> str:
        return f"rank {self.party.rank}{': ' * bool(collective)}{collective} ({self._activity})"


def is_of_the_network(error: BaseException) -> bool:
    """Tell whether an error of torch comes from a failed rank or network."""
    is_torchs = isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in OF_THE_NETWORK
    )
    return isinstance(error, dist.DistError) or is_torchs


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without torch's source location and gloo's advice."""
    line = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", line)[:300]
