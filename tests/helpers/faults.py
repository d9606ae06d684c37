"""A training with faults: `python -m faults CONFIG` does what `-m distap.train` does, but for what
it is told.

FAULTS holds texts such as `SIGKILL rank=1 step=3 stage=replay`, separated by semicolons. A fault
happens once, where that stage of that step begins, and not again after a restart: describe, rank,
replay, and after them checkpoint (killed only) and evaluation; `start` comes before step 0.
Actions: the name of a signal that the rank sends itself, and `stand-still`.

RECORD names a folder in which each rank writes down the images of every step that it has done; the
file RANK.ATTEMPT beside it holds the rank's process id.
"""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.checkpoint import writer
from distap.stages.micro_batches import Batch
from distap.stages.step import Described, ThreeStages
from distap.train import main
from distap.trainer import Trainer
from distap.training.learner import StepResult, TrainingStep
from distap.training.run_state import RunState
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
    """Wrap the stages of every step, and what a run does beside its steps."""
    at = 0  # the step that is being done

    def actions(world: World, stage: str) -> list[str]:
        return [fault.action for fault in faults if fault.happens(world.rank, at, stage)]

    def act(world: World, stage: str) -> None:
        """Send the signals of this place, or stand still."""
        for action in actions(world, stage):
            if action.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, action))
            if action == "stand-still":
                threading.Event().wait()

    def acting_before(owner: type, name: str, stage: str) -> None:
        method = getattr(owner, name)

        def acting(self: Any, *arguments: object) -> object:
            act(self.world, stage)
            return method(self, *arguments)

        setattr(owner, name, acting)

    for stage in ("describe", "rank", "replay"):
        acting_before(ThreeStages, stage, stage)
    acting_before(Trainer, "evaluate", "evaluation")
    acting_before(RunState, "resume", "start")
    describe = ThreeStages.describe
    write_tensors = writer.write_tensors

    def faulty_describe(self: ThreeStages, batch: Batch) -> Described:
        nonlocal at
        at = batch.step
        return describe(self, batch)

    def faulty_saving(folder: Path, *arguments: object) -> None:
        write_tensors(folder, *arguments)
        step = int(folder.name[5:13]) - 1  # the step that is being done may be a later one
        if any(
            fault.happens(int(os.environ.get("RANK", "0")), step, "checkpoint") for fault in faults
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    ThreeStages.describe = faulty_describe
    writer.write_tensors = faulty_saving


def record(folder: Path) -> None:
    """Write down what each step of this rank was done with."""
    call = TrainingStep.__call__

    def recorded(self: TrainingStep, batch: Batch, learning_rate: float) -> StepResult:
        result = call(self, batch, learning_rate)
        world = self.learner.world
        order = range(batch.total) if batch.order is None else batch.order.tolist()
        line = {
            "step": batch.step,
            "ranks": world.size,
            "slots": list(order[world.rank :: world.size]),
            "samples": [int(sample) for sample in batch.samples],
        }
        with (folder / f"{self.learner.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    TrainingStep.__call__ = recorded


def recorded_batches(folder: Path) -> dict[int, set[tuple[int, ...]]]:
    """The global batches that were trained on, by step, in slot order; more than one where they
    were not the same.
    """
    shares: dict[tuple[int, int, int], list[list[tuple[int, int]]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            key = entry["step"], entry["ranks"], int(path.stem)
            pairs = list(zip(entry["slots"], entry["samples"], strict=True))
            shares.setdefault(key, []).append(pairs)
    batches: dict[int, set[tuple[int, ...]]] = {}
    for step, ranks in {(step, ranks) for step, ranks, _ in shares}:
        by_rank = [shares.get((step, ranks, rank), []) for rank in range(ranks)]
        # A rank that was killed after the others had done the step left no record of it.
        for attempt in zip(*by_rank, strict=False):
            batch = sorted(pair for pairs in attempt for pair in pairs)
            batches.setdefault(step, set()).add(tuple(sample for _, sample in batch))
    return batches


if __name__ == "__main__":
    inject([Fault.read(text) for text in os.environ.get("FAULTS", "").split(";") if text.strip()])
    records = Path(os.environ["RECORD"])
    record(records)
    attempt = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    (records.parent / attempt).write_text(str(os.getpid()))
    main()
