"""Real trainings in processes of their own, which faults can be injected into."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import recorded_batches
from launching import Job, Launch, started
from small_trainings import recipe

STEPS = 8


class Run:
    """A training in a folder of its own, started as often as needed."""

    def __init__(self, folder: Path, shards: tuple[Path, ...], **changes: object) -> None:
        self.folder = folder / "run"
        self.records = folder / "records"
        self.records.mkdir(parents=True)
        settings = {
            "steps": STEPS,
            "checkpoint": {"every": 2},
            "timeout_seconds": 60.0,
            "optimizer": {"eps": 1e-2},
            **changes,
        }
        self.steps = int(settings["steps"])
        self.config = folder / "recipe.yaml"
        self.config.write_text(
            json.dumps(recipe(self.folder, shards, **settings).model_dump(mode="json"))
        )

    @contextmanager
    def started(self, ranks: int, faults: str = "", restarts: int = 0) -> Iterator[Job]:
        """On `ranks` ranks of this machine, by distap's launcher."""
        options = f"--nproc-per-node={ranks} --max-restarts={restarts}"
        with started(
            self.launch(options), self.folder.parent, **self.environment, FAULTS=faults
        ) as job:
            yield job

    def launch(self, options: str) -> Launch:
        """Launch it; `options` are torchrun's."""
        return Launch(options, "faults", str(self.config))

    @property
    def environment(self) -> dict[str, str]:
        """What its ranks need to know."""
        return {"RECORD": str(self.records)}

    def go(self, ranks: int, faults: str = "", restarts: int = 0) -> tuple[int, str]:
        """Start and wait; exit status and what it said."""
        with self.started(ranks, faults, restarts) as job:
            return job.status(), job.said

    def has_done(self, step: int, rank: int = 0) -> bool:
        """Whether a rank has done the step."""
        record = self.records / f"{rank}.jsonl"
        return record.exists() and f'"step": {step},' in record.read_text()

    def last_step(self, rank: int = 0) -> int:
        """The newest step that a rank has done."""
        record = self.records / f"{rank}.jsonl"
        return int(json.loads(record.read_text().splitlines()[-1])["step"])

    def batches(self) -> list[tuple[int, ...]]:
        """The images of each step, which must have been the same whenever the step was done."""
        recorded = recorded_batches(self.records)
        assert sorted(recorded) == list(range(self.steps))
        assert all(len(batches) == 1 for batches in recorded.values())
        return [next(iter(recorded[step])) for step in range(self.steps)]
