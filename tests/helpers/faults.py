"""A training with faults: `python -m faults CONFIG` does what `-m distap.train` does, but for what it is told.

FAULTS holds texts such as `SIGKILL rank=1 step=3 stage=replay`, separated by semicolons. A fault happens once, where
that stage of that step begins, and not again after a restart: describe, rank, replay, update, and after them
checkpoint and evaluation; `start` comes before step 0. Actions: the name of a signal that the rank sends
itself, `stand-still`, `nan-descriptor` (the first image of the rank is described as NaN) and `nan-gradient`.

RECORD names a folder in which each rank writes down the images of every step that it has done.
"""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distap.checkpoint import writer
from distap.processes.stopping import StopRequest
from distap.step import Batch, StepResult, ThreeStageStep
from distap.train import main
from distap.trainer import Trainer
from distap.training.state import RunState
from distap.world import World


@dataclass
class Fault:
    action: str
    rank: int
    step: int
    stage: str

    @classmethod
    def read(cls, text: str) -> "Fault":
        action, *settings = text.split()
        values = dict(setting.split("=") for setting in settings)
        return cls(action, int(values["rank"]), int(values["step"]), values["stage"])

    def happens(self, world_rank: int, step: int, stage: str) -> bool:
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        return first_start and (self.rank, self.step, self.stage) == (world_rank, step, stage)


def inject(faults: list[Fault]) -> None:
    """Wrap the stages of every step."""
    describe, described, rank, replay, update = (
        getattr(ThreeStageStep, name) for name in ("describe", "_described", "rank", "replay", "update")
    )
    at = 0  # the step that is being done

    files_of_rank, evaluate, resume = writer.files_of_rank, Trainer._evaluate, RunState.resume

    def act(world: World, stage: str, step: int | None = None) -> list[str]:
        """Send the signals of this place; the other actions are the caller's."""
        actions = [fault.action for fault in faults if fault.happens(world.rank, at if step is None else step, stage)]
        for action in actions:
            if action.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, action))
            if action == "stand-still":
                threading.Event().wait()
        return actions

    def faulty_describe(self: ThreeStageStep, batch: Batch) -> object:
        nonlocal at
        at = batch.step
        act(self.world, "describe")
        return describe(self, batch)

    def faulty_described(self: ThreeStageStep, batch: Batch, rows: slice, *arguments: object) -> Tensor:
        descriptors = described(self, batch, rows, *arguments)
        mine = [fault.action for fault in faults if fault.happens(self.world.rank, at, "describe")]
        if rows.start == 0 and "nan-descriptor" in mine:
            descriptors[0] = torch.nan
        return descriptors

    def faulty_rank(self: ThreeStageStep, *arguments: object) -> object:
        act(self.world, "rank")
        return rank(self, *arguments)

    def faulty_replay(self: ThreeStageStep, *arguments: object) -> float:
        act(self.world, "replay")
        return replay(self, *arguments)

    def faulty_saving(folder: Path, rank: int) -> list[str]:
        act(World(rank), "checkpoint", int(folder.name[6:14]) - 1)  # the step that is being done may be a later one
        return files_of_rank(folder, rank)

    def faulty_evaluation(self: Trainer, stop: StopRequest) -> float | None:
        act(self.world, "evaluation")
        return evaluate(self, stop)

    def faulty_resume(self: RunState) -> int:
        act(self.world, "start")
        return resume(self)

    def faulty_update(self: ThreeStageStep, rate: float) -> float:
        # On every rank, as a sum over ranks with one such gradient is.
        if any(fault.action == "nan-gradient" and fault.step == at for fault in faults):
            next(p for p in self.engine.network.parameters() if p.grad is not None).grad.fill_(torch.nan)
        return update(self, rate)

    writer.files_of_rank = faulty_saving
    Trainer._evaluate = faulty_evaluation
    RunState.resume = faulty_resume
    for name, wrapper in {
        "describe": faulty_describe,
        "_described": faulty_described,
        "rank": faulty_rank,
        "replay": faulty_replay,
        "update": faulty_update,
    }.items():
        setattr(ThreeStageStep, name, wrapper)


def record(folder: Path) -> None:
    """Write down what each step of this rank was done with."""
    call = ThreeStageStep.__call__

    def recorded(self: ThreeStageStep, batch: Batch, learning_rate: float) -> StepResult:
        result = call(self, batch, learning_rate)
        line = {"step": batch.step, "ranks": self.world.size, "samples": [int(sample) for sample in batch.samples]}
        with (folder / f"{self.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    ThreeStageStep.__call__ = recorded


def recorded_batches(folder: Path) -> dict[int, set[tuple[int, ...]]]:
    """The global batches that were trained on, by step, in slot order; more than one where they were not the same."""
    shares: dict[tuple[int, int, int], list[list[int]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            key = entry["step"], entry["ranks"], int(path.stem)
            shares.setdefault(key, []).append(entry["samples"])
    batches: dict[int, set[tuple[int, ...]]] = {}
    for step, ranks in {(step, ranks) for step, ranks, _ in shares}:
        by_rank = [shares.get((step, ranks, rank), []) for rank in range(ranks)]
        # A rank that was killed after the others had done the step left no record of it.
        for attempt in zip(*by_rank, strict=False):
            batch = [0] * sum(map(len, attempt))
            for rank, samples in enumerate(attempt):
                batch[rank::ranks] = samples
            batches.setdefault(step, set()).add(tuple(batch))
    return batches


if __name__ == "__main__":
    inject([Fault.read(text) for text in os.environ.get("FAULTS", "").split(";") if text.strip()])
    if "RECORD" in os.environ:
        record(Path(os.environ["RECORD"]))
    main()
