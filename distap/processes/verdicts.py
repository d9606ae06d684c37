"""Work out which rank is at fault, from what every rank writes about itself."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field

from distap.errors import FAILED, MISTAKE
from distap.processes.meeting import RankProcess, listed
from distap.processes.shared_values import as_utf8

NO_SUSPECT = "every rank has begun it, so one may hang in it, or the network between them is broken"
# Text and exit status, which is never that of a finished training.
Verdict = tuple[str, Annotated[int, Field(ge=FAILED, le=MISTAKE)]]


@dataclass
class Collective:
    """A collective operation that this rank has started."""

    name: str
    number: int  # the same on every rank
    since: float = field(default_factory=time.monotonic)
    returned: bool = False
    done: torch.cuda.Event | None = None  # a GPU's collective returns before it is done

    def is_over(self) -> bool:
        return self.returned and (self.done is None or self.done.query())


@dataclass(frozen=True)
class Beat:
    """A rank's report on what it does, by its own clock, or on why it has left."""

    time: float
    begun: int  # number of collectives
    doing: str
    seconds: float  # for which it has been doing this
    left: str | None = None
    status: int | None = None


class Progress:
    """This rank's activity, its collectives, and why it leaves."""

    def __init__(self) -> None:
        self.note("start")
        self.left: str | None = None
        self.status: int | None = None
        self._begun = 0
        self._open: list[Collective] = []

    def note(self, activity: str) -> None:
        self.activity = activity
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Return for how many seconds the activity has lasted."""
        return time.monotonic() - self._since

    def begin(self, name: str) -> Collective:
        # Every rank counts alike, so the number of the late one shows which ranks have not come to
        # it yet.
        self._begun += 1
        collective = Collective(name, self._begun)
        self._open = [*(entry for entry in self._open if not entry.is_over()), collective]
        return collective

    def waiting(self) -> Collective | None:
        """Return the oldest collective that is not over."""
        return next((entry for entry in self._open if not entry.is_over()), None)

    def beat(self) -> Beat:
        waiting = self.waiting()
        return Beat(
            time=time.time(),
            begun=self._begun,
            doing=self.activity + (f", waiting in {waiting.name}" if waiting else ""),
            seconds=self.seconds(),
            left=self.left,
            status=self.status,
        )


@dataclass
class Case:
    """The reason why this rank cannot go on, and the search for the rank at fault."""

    problem: str
    late: Collective | None = None
    error: str = ""  # of a collective that failed
    opened: float = field(default_factory=time.monotonic)
    _first_look: tuple[float, Sequence[Beat | None]] | None = None

    def verdict(
        self,
        ranks: Sequence[RankProcess],
        beats: Sequence[Beat | None],
        beat_seconds: float,
        silence: float,
    ) -> Verdict | None:
        """Return the verdict on the other `ranks` by their `beats`, or None while it is too early.

        A rank is silent if nothing of what it wrote has changed between two looks. Times that other
        hosts wrote are compared with nothing of ours, since clocks differ.
        """
        now = time.monotonic()
        if self._first_look is None:
            self._first_look = now, beats
        since, first_beats = self._first_look
        # Whoever leaves reports it at once, and the others' hearts must have time to beat.
        is_late = now - since > silence + beat_seconds
        reports = [beat for beat in beats if beat is not None]
        if not is_late and all(beat.left is None for beat in reports):
            return None

        suspicions = [
            self._suspicion(rank, beat, silence if is_late and beat == first else 0)
            for rank, beat, first in zip(ranks, beats, first_beats, strict=True)
        ]
        suspects = listed([*filter(None, suspicions)]) or NO_SUSPECT
        # A mistake that a person must mend is one on every host, so that none of them starts again.
        is_mistake = any(beat.status == MISTAKE for beat in reports)
        text = as_utf8(f"{self.problem}: {suspects}{self.error}")
        return text, MISTAKE if is_mistake else FAILED

    def _suspicion(self, rank: RankProcess, beat: Beat | None, silence: float) -> str:
        """Return what speaks against a rank that has been silent for at least `silence` seconds."""
        if beat is None:
            return f"{rank} has not been heard of" if silence else ""
        if beat.left is not None:
            return f"{rank} left: {beat.left}"
        if silence:  # the clock of its host may be wrong, so this time is but a hint
            quiet = max(time.time() - beat.time, silence)
            return f"{rank} has not been heard of for {quiet:.0f} s; it was in {beat.doing}"
        if self.late is not None and beat.begun < self.late.number:
            doing = f"{beat.doing} for {beat.seconds:.0f} s"
            return f"{rank} has not reached it; it has been in {doing}"
        return ""
