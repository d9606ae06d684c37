"""Find out which rank keeps a collective from finishing, say so on every rank, and end the process.

A rank whose peer is stopped, stuck or cut off would wait in its collective until the process group's time-out, and
then know only that somebody did not answer. So every rank runs two threads:

    beat    every second: write to the store what this rank does, and read what is known of the others there
    judge   every half second: compare the age of open collectives with the time-out

The judge uses this rank's memory alone, because a call to the store over a broken network never returns. When a
collective exceeds the time-out, the judge works out which rank is missing and why (the verdict), all ranks learn the
verdict through the store, and the process ends: a thread that waits in gloo cannot be interrupted.
"""

import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distap.errors import FAILED, CollectiveError
from distap.processes.beats import Beats, Said
from distap.processes.exit_statuses import record_outcome
from distap.processes.roll_call import Party

BEAT_SECONDS = 1.0
SILENT_BEATS = 3.0
LEAVE_SECONDS = 5.0  # from the verdict to the end of the process, unless the main thread leaves by itself
NAMED = 8  # missing ranks that a message names
# gloo, NCCL and the store raise plain RuntimeErrors, which these marks tell apart.
OF_THE_NETWORK = ("/gloo/", "NCCL error", "NCCL communicator", "Connection ", "Broken pipe", "imed out")
VERDICT = "verdict"
logger = logging.getLogger("distap")


@dataclass
class _Collective:
    """A collective that this rank has begun."""

    name: str
    channel: str
    number: int  # in its channel, the same on every rank
    since: float
    returned: bool = False
    done: torch.cuda.Event | None = None  # a GPU's collective returns before it is done

    def is_over(self) -> bool:
        return self.returned and (self.done is None or self.done.query())


class Watchdog:
    """Watches the collectives of one rank until `stop`; each may take `timeout_seconds`."""

    def __init__(self, party: Party, timeout_seconds: float) -> None:
        self.party, self.timeout_seconds = party, timeout_seconds
        self.beat_seconds = min(BEAT_SECONDS, timeout_seconds / 10)
        self._silence = SILENT_BEATS * self.beat_seconds  # after which a rank or the store may be gone
        self._known = Beats(party.rank, len(party.members), self._silence)
        self.verdict: str | None = None
        self._activity, self._active_since = "start", time.monotonic()
        self._begun: dict[str, int] = {}  # collectives by channel
        self._open: list[_Collective] = []
        self._beats = 0
        self._farewell: str | None = None
        self._store_heard = time.monotonic()
        self._store_error = ""
        self._is_raised = False  # the main thread raises the verdict, so the judge need not log it
        self._wondering = False  # read what the others say, although no collective takes long
        self._awake = threading.Event()  # set to make the beating thread beat at once
        self._leaving, self._stopped, self._condemned = (threading.Event() for _ in range(3))
        self._store = party.store.clone()  # a connection serves one call at a time
        self._beating = threading.Thread(target=self._beat, name="distap-beat", daemon=True)
        self._judging = threading.Thread(target=self._judge, name="distap-judge", daemon=True)
        self._beating.start()
        self._judging.start()

    def stop(self, farewell: str = "finished") -> None:
        """Tell the other ranks why this one leaves, and end the threads."""
        deadline = time.monotonic() + self._silence
        self._farewell = farewell
        # The store ends with the process that serves it, and the others may still want to read this farewell.
        while self.party.serves and time.monotonic() < deadline and not all(self._known.left()):
            self._look_at_once()
        self._leaving.set()
        self._awake.set()
        self._beating.join(self._silence)
        self._stopped.set()
        self._condemned.set()
        self._judging.join(self._silence)

    @property
    def activity(self) -> tuple[str, float]:
        """Return what this rank does at present, and for how many seconds."""
        return self._activity, time.monotonic() - self._active_since

    def note(self, activity: str) -> None:
        self._activity, self._active_since = activity, time.monotonic()

    @contextmanager
    def collective(self, name: str, channel: str = "", device: torch.device | None = None) -> Iterator[None]:
        """Watch the enclosed collective; raise a CollectiveError if the network or another rank makes it fail.

        Every rank enters the collectives of a `channel`, a process group, in the same order.
        """
        if self.verdict is not None:
            raise CollectiveError(self.verdict)
        self._begun[channel] = number = self._begun.get(channel, 0) + 1
        collective = _Collective(name, channel, number, time.monotonic())
        self._open.append(collective)
        try:
            yield
        except RuntimeError as error:
            if not is_of_the_network(error):
                raise
            raise CollectiveError(self._explanation(name, error)) from error
        finally:
            if device is not None and device.type == "cuda":
                collective.done = torch.cuda.Event()
                collective.done.record(torch.cuda.current_stream(device))
            collective.returned = True
            self._open = [one for one in self._open if not one.is_over()]

    def _explanation(self, name: str, error: Exception) -> str:
        """Wait a few beats for the others' farewells, condemn all ranks, and return the verdict."""
        deadline = time.monotonic() + self._silence + self.beat_seconds
        while self.verdict is None and time.monotonic() < deadline and not any(self._known.left()):
            self._look_at_once()
        self._is_raised = True
        self._condemn(f"{self._here(name)} failed: {self._reasons()}; {_first_line(error)}")
        assert self.verdict is not None
        return self.verdict

    def _condemn(self, verdict: str) -> None:
        self.verdict = self.verdict or verdict
        self._awake.set()
        self._condemned.set()

    def _beat(self) -> None:
        while True:
            is_last = self._leaving.is_set()
            try:
                self._exchange_verdicts()
                self._beats += 1
                self._known.say(self._store, self._said())
                if self._wondering or any(time.monotonic() - one.since > self.beat_seconds for one in self._open):
                    self._known.listen(self._store)
                self._store_heard, self._store_error = time.monotonic(), ""
            except RuntimeError as error:
                self._store_error = f": {_first_line(error)}"
            if is_last:
                return
            self._awake.wait(self.beat_seconds)
            self._awake.clear()

    def _said(self) -> Said:
        said = {
            "beat": self._beats,
            "activity": self._activity,
            "seconds": time.monotonic() - self._active_since,
            "begun": dict(self._begun),
            "waiting": next((one.name for one in self._open), None),
        }
        return said if self._farewell is None else said | {"left": self._farewell}

    def _exchange_verdicts(self) -> None:
        if self.verdict is not None:
            self._store.compare_set(VERDICT, "", self.verdict)
        elif self._store.check([VERDICT]):
            self._condemn(self._store.get(VERDICT).decode())

    def _look_at_once(self) -> None:
        self._wondering = True
        self._awake.set()
        self._stopped.wait(self.beat_seconds / 5)

    def _judge(self) -> None:
        woken = time.monotonic()
        while not self._condemned.wait(self.beat_seconds / 2):
            now = time.monotonic()
            if now - woken > self._silence:
                self._forgive(now - woken)
            woken = now
            unfinished = next((one for one in self._open if not one.is_over()), None)
            if unfinished is not None and now - unfinished.since > self.timeout_seconds:
                late = f"did not finish within {self.timeout_seconds:g} s"
                self._condemn(f"{self._here(unfinished.name)} {late}: {self._reasons(unfinished)}")
            elif now - self._store_heard > self.timeout_seconds:
                self._condemn(f"{self._here(unfinished.name if unfinished else '')} cannot go on: {self._reasons()}")
        if not self._stopped.is_set():
            try:
                self._announce()
            finally:
                if not self._stopped.wait(LEAVE_SECONDS):
                    os._exit(FAILED)

    def _forgive(self, seconds: float) -> None:
        """Shift all clocks: this process was stopped for a while, so nobody else was silent in that time."""
        for collective in self._open:
            collective.since += seconds
        self._known.forgive(seconds)
        self._store_heard += seconds

    def _announce(self) -> None:
        assert self.verdict is not None
        if not self._is_raised:
            logger.error("%s", self.verdict)
        if not (self._open or self._is_raised):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            where = "".join(traceback.format_stack(frame)[-4:])
            logger.error("%s was here when it was told:\n%s", self._here(), where)
        record_outcome(FAILED, CollectiveError(self.verdict))

    def _here(self, collective: str = "") -> str:
        return f"rank {self.party.rank}{': ' * bool(collective)}{collective} ({self._activity})"

    def _reasons(self, collective: _Collective | None = None) -> str:
        """Name the missing ranks, as far as this rank knows."""
        now = time.monotonic()
        if now - self._store_heard > self._silence:
            unknown = [str(member) for member in self.party.members if member.rank != self.party.rank]
            return (
                f"the store at {self.party.address} has not answered for {now - self._store_heard:.0f} s"
                f"{self._store_error}: the network to it is broken, or the host that serves it is down; "
                f"nothing is known of {_listed(unknown)}"
            )
        found: list[str] = []
        for rank, other in self._known.known().items():
            member, said, silent = self.party.members[rank], other.said, now - other.heard
            doing = said.get("activity", "start")
            if said.get("waiting"):
                doing += f", waiting in {said['waiting']}"
            if other.has_left:
                found.append(f"{member} left: {said['left']}")
            elif silent > self._silence:
                found.append(f"{member} has not been heard of for {silent:.0f} s; it was in {doing}")
            elif collective is not None and other.is_behind(collective.channel, collective.number):
                found.append(f"{member} has not reached it; it has been in {doing} for {said['seconds']:.0f} s")
        nobody = "every rank has begun it, so one may hang in it, or the network between them is broken"
        if self._known.is_cut:
            nobody = "more ranks lag behind than rank 0 tells of; its own log names those that have not reached it"
        return _listed(found, self._known.is_cut) or nobody


def is_of_the_network(error: BaseException) -> bool:
    """Tell whether torch raised this error because a rank or the network failed."""
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in OF_THE_NETWORK)


def _first_line(error: Exception) -> str:
    """Strip torch's source location and gloo's advice."""
    line = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", line)[:300]


def _listed(texts: list[str], is_cut: bool = False) -> str:
    more = f"and {'at least ' * is_cut}{len(texts) - NAMED} more"
    return "; ".join([*texts[:NAMED], more] if len(texts) > NAMED else texts)
