"""Find the rank that keeps a collective from finishing, report it on every rank, and end the process.

A rank whose peer is stopped, stuck or cut off would wait in its collective until the process group's time-out, and
then know only that somebody did not answer. So every rank runs two threads:

    heartbeat   every second: write to the store what this rank does, and look there for a verdict
    judge       every half second: compare the age of open collectives with the time-out

When a collective exceeds the time-out or fails, a rank opens a case. All ranks would read the heartbeats of all
others then, so the first one to claim the case does it for all: it sees who has left, whose heart stands still and
who has not begun the collective, and writes down the verdict. Then every process ends, since a thread that waits in
gloo cannot be interrupted.

    beat/R      what rank R does
    claim       the rank that works out the verdict
    verdict     its text, and the exit status of all ranks
"""

import json
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
from typing import Any

import torch
import torch.distributed as dist

from distap.errors import FAILED, MISTAKE, CollectiveError
from distap.processes.heartbeat import Collective, Heart
from distap.processes.roll_call import Party

BEAT_SECONDS = 1.0
SILENT_BEATS = 3.0
LEAVE_SECONDS = 5.0  # from the verdict to the end of the process, unless the main thread leaves by itself
NAMED = 8  # missing ranks that a message names
# gloo, NCCL and the store raise plain RuntimeErrors, which these marks tell apart.
OF_THE_NETWORK = ("/gloo/", "NCCL error", "NCCL communicator", "Connection ", "Broken pipe", "imed out")
logger = logging.getLogger("distap")


@dataclass
class _Case:
    """A reason why this rank cannot continue."""

    problem: str
    collective: Collective | None
    opened: float
    details: str = ""


class Watchdog:
    """Watch the collectives of one rank until `stop`; each may take `timeout_seconds`."""

    def __init__(self, party: Party, timeout_seconds: float) -> None:
        self.party, self.timeout_seconds = party, timeout_seconds
        self.beat_seconds = min(BEAT_SECONDS, timeout_seconds / 10)
        self.verdict: str | None = None
        self._silence = SILENT_BEATS * self.beat_seconds  # after which a rank or the store may be gone
        self._status = FAILED
        self._activity, self._active_since = "start", time.monotonic()
        self._begun: dict[str, int] = {}  # collectives by channel
        self._open: list[Collective] = []
        self._case: _Case | None = None
        self._hearts: dict[int, Heart] = {}  # those that this rank has read
        self._claimed = 0.0  # when this rank claimed the case
        self._farewell: dict[str, Any] = {}
        self._store_heard, self._store_error = time.monotonic(), ""
        self._is_raised = self._lingers = False
        self._awake = threading.Event()  # set to make the heart beat at once
        self._leaving, self._stopped, self._condemned = (threading.Event() for _ in range(3))
        self._store = party.store.clone()  # a connection serves one call at a time
        self._store.set(f"beat/{party.rank}", json.dumps(self._said()))
        self._beating = threading.Thread(target=self._beat, name="distap-beat", daemon=True)
        self._judging = threading.Thread(target=self._judge, name="distap-judge", daemon=True)
        self._beating.start()
        self._judging.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Tell the other ranks why this rank leaves, and end the threads.

        A launcher stops all ranks when one has left with an error, so let the others first say why they fail. The
        store ends with the process that serves it, so let the others first read what it says.
        """
        deadline = time.monotonic() + self._silence
        text = "finished" if error is None else f"{type(error).__name__}: {error}"
        self._farewell = {"left": text, "status": getattr(error, "status", FAILED)}
        self._lingers = self.party.serves or error is not None
        while self._lingers and time.monotonic() < deadline and self._is_awaited():
            self._awake.set()
            self._stopped.wait(self.beat_seconds / 5)
        self._leaving.set()
        self._awake.set()
        self._beating.join(self._silence)
        self._stopped.set()
        self._condemned.set()
        self._judging.join(self._silence)

    @property
    def activity(self) -> tuple[str, float]:
        """Return what this rank does now, and for how many seconds."""
        return self._activity, time.monotonic() - self._active_since

    def note(self, activity: str) -> None:
        self._activity, self._active_since = activity, time.monotonic()

    @contextmanager
    def collective(self, name: str, channel: str = "", device: torch.device | None = None) -> Iterator[None]:
        """Watch the enclosed collective; raise a CollectiveError if the network or another rank breaks it.

        Every rank enters the collectives of a `channel`, a process group, in the same order.
        """
        if self.verdict is not None:
            raise self._error(self.verdict)
        self._begun[channel] = number = self._begun.get(channel, 0) + 1
        collective = Collective(name, channel, number, time.monotonic())
        self._open.append(collective)
        try:
            yield
        except RuntimeError as error:
            if not is_of_the_network(error):
                raise
            self._is_raised = True  # so the judge need not log it
            self._open_case(f"{self._here(name)} failed", None, f"; {_first_line(error)}")
            self._condemned.wait()  # the judge sees to it that this ends
            raise self._error(self.verdict or str(error)) from error
        finally:
            if device is not None and device.type == "cuda":
                collective.done = torch.cuda.Event()
                collective.done.record(torch.cuda.current_stream(device))
            collective.returned = True
            self._open = [one for one in self._open if not one.is_over()]

    def _error(self, verdict: str) -> CollectiveError:
        error = CollectiveError(verdict)
        error.status = self._status
        return error

    def _open_case(self, problem: str, collective: Collective | None = None, details: str = "") -> None:
        self._case = self._case or _Case(problem, collective, time.monotonic(), details)
        self._awake.set()

    def _condemn(self, verdict: str, status: int) -> None:
        if self.verdict is None:
            self._status, self.verdict = status, verdict
        self._condemned.set()

    def _beat(self) -> None:
        """Exchange heartbeats with the store; only this thread calls the store, since a call may never return."""
        while True:
            is_last = self._leaving.is_set()
            try:
                self._exchange()
                self._store_heard, self._store_error = time.monotonic(), ""
            except RuntimeError as error:
                self._store_error = f": {_first_line(error)}"
            if is_last:
                return
            self._awake.wait(self.beat_seconds)
            self._awake.clear()

    def _exchange(self) -> None:
        me = str(self.party.rank)
        self._store.set(f"beat/{me}", json.dumps(self._said()))
        if self.verdict is None and self._store.check(["verdict"]):
            self._condemn(*json.loads(self._store.get("verdict")))
        elif self._case is not None and self._store.compare_set("claim", "", me).decode() == me:
            self._claimed = self._claimed or time.monotonic()
            self._read_hearts()
            # Whoever left says so at once, and the others' hearts must have time to beat.
            has_left = any("left" in heart.said for heart in self._hearts.values())
            if has_left or time.monotonic() - self._claimed > self._silence + self.beat_seconds:
                self._condemn(*self._verdict_of(self._case))
                self._store.compare_set("verdict", "", json.dumps([self.verdict, self._status]))
        elif self._case is None and self._lingers:
            self._read_hearts()

    def _said(self) -> dict[str, Any]:
        activity, seconds = self.activity
        doing = {"activity": activity, "seconds": seconds, "waiting": [one.name for one in self._open][:1]}
        return {"time": time.time(), "begun": dict(self._begun), **doing, **self._farewell}

    def _read_hearts(self) -> None:
        """Read the heartbeats of all other ranks."""
        others = [member for member in self.party.members if member.rank != self.party.rank]
        now = time.monotonic()
        said = self._store.multi_get([f"beat/{member.rank}" for member in others]) if others else []
        for member, text in zip(others, map(json.loads, said), strict=True):
            known = self._hearts.setdefault(member.rank, Heart(member, text, now))
            if text != known.said:
                known.said, known.changed = text, now

    def _is_awaited(self) -> bool:
        """Tell whether another rank may still wait for this rank's farewell."""
        left = ["left" in heart.said for heart in self._hearts.values()]
        return self.verdict is None and sum(left) < len(self.party.members) - 1

    def _judge(self) -> None:
        """Watch the clock with local data only, since a call to the store over a broken network never returns."""
        woken = time.monotonic()
        while not self._condemned.wait(self.beat_seconds / 2):
            now = time.monotonic()
            if now - woken > self._silence:  # this process was stopped: nobody else was silent in that time
                self._store_heard += now - woken
                for one in self._open:
                    one.since += now - woken
            woken = now
            unfinished = next((one for one in self._open if not one.is_over()), None)
            if unfinished is not None and now - unfinished.since > self.timeout_seconds:
                late = f"did not finish within {self.timeout_seconds:g} s"
                self._open_case(f"{self._here(unfinished.name)} {late}", unfinished)
            elif now - self._store_heard > self.timeout_seconds:
                self._open_case(f"{self._here(unfinished.name if unfinished else '')} cannot go on")
            # The store may not answer, or the rank that has claimed the case is lost itself.
            if self._case is not None and now - self._case.opened > 4 * self._silence:
                self._condemn(*self._verdict_of(self._case))
        if not self._stopped.is_set():
            try:
                self._announce()
            finally:
                if not self._stopped.wait(LEAVE_SECONDS):
                    os._exit(self._status)

    def _announce(self) -> None:
        assert self.verdict is not None
        if not self._is_raised:
            logger.error("%s", self.verdict)
        if not (self._open or self._is_raised):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            where = "".join(traceback.format_stack(frame)[-4:])
            logger.error("%s was here when it was told:\n%s", self._here(), where)

    def _here(self, collective: str = "") -> str:
        return f"rank {self.party.rank}{': ' * bool(collective)}{collective} ({self._activity})"

    def _verdict_of(self, case: _Case) -> tuple[str, int]:
        """Name the missing ranks, as far as this rank knows, and the exit status to end with."""
        silent = time.monotonic() - self._store_heard
        if silent > self._silence:
            unknown = [str(member) for member in self.party.members if member.rank != self.party.rank]
            reasons = (
                f"the store at {self.party.address} has not answered for {silent:.0f} s{self._store_error}: the "
                f"network to it is broken, or the host that serves it is down; nothing is known of {_listed(unknown)}"
            )
        else:
            found = (heart.problem(case.collective, self._silence) for heart in self._hearts.values())
            otherwise = "every rank has begun it, so one may hang in it, or the network between them is broken"
            if not self._claimed:
                otherwise = "the rank that was to find out why has not been heard of since"
            reasons = _listed([problem for problem in found if problem is not None]) or otherwise
        # A mistake that a person must mend is one on every host, so that none of them starts again.
        is_mistake = any(heart.said.get("status") == MISTAKE for heart in self._hearts.values())
        return f"{case.problem}: {reasons}{case.details}", MISTAKE if is_mistake else FAILED


def is_of_the_network(error: BaseException) -> bool:
    """Tell whether this error of torch comes from a failed rank or network."""
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in OF_THE_NETWORK)


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without torch's source location and gloo's advice."""
    line = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", line)[:300]


def _listed(texts: list[str]) -> str:
    return "; ".join([*texts[:NAMED], f"and {len(texts) - NAMED} more"] if len(texts) > NAMED else texts)
