"""What a run's folder says of it: its log, its recipe, its first and its newest evaluations."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from distap.config.reading import parsed_yaml
from distap.errors import DistapError, without_secrets
from distap.evaluation.saved import Evaluation, folder_of_step, read_evaluations, saved_steps
from distap.evaluation.upgrade import upgrade_lines
from distap.retrieval.descriptor_files import reading
from distap.storage.texts import read_text
from distap.telemetry.runlog import read_run_log, read_starts
from distap.telemetry.terminal import rows_of_sets

SUMMARY_FIGURES = ("mAP", "mAP@R", "R@1")
SECTIONS = ("data", "loss", "model", "sampling", "steps")  # of a recipe, which a report needs


@dataclass(frozen=True)
class Run:
    folder: Path
    recipe: dict[str, Any]
    entries: list[dict[str, Any]]  # lines of its log
    # those of the network that the training began with, by data set, the validation set first
    before: dict[str, Evaluation]
    after: dict[str, Evaluation]  # those of the network as it is now
    # when, where and with which versions it was started; empty of an older run
    starts: list[dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if "loss" in entry]

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Return the log's evaluations, the last of each step."""
        lines = {entry["step"]: entry for entry in self.entries if "validation" in entry}
        return [lines[step] for step in sorted(lines)]

    @property
    def highest_score(self) -> tuple[str, float | None, int | None]:
        """Return what chooses the best checkpoint, its highest value in the log, and its step."""
        name = "validation mAP"  # also of lines that do not name it
        best = None
        value = None
        for entry in self.validations:
            [(figure, score)] = entry.get("score", {name: entry["validation"].get("mAP")}).items()
            if figure != name or value is None or score > value:
                name, value, best = figure, score, entry["step"]
        return name, value, best

    @property
    def since_best(self) -> int:
        """Return how many evaluations in a row have not raised that figure, with a patience."""
        counts = [entry["since_best"] for entry in self.entries if "since_best" in entry]
        return counts[-1] if counts else 0

    @property
    def sets(self) -> list[list[str]]:
        """Return a table of the last evaluation, without rows if it was of a single set."""
        last = self.validations[-1] if self.validations else {}
        if "also" not in last:
            return []
        validation = self.recipe["data"]["validation"]
        if isinstance(validation, dict):
            return rows_of_sets(last["also"])
        return rows_of_sets({without_secrets(validation): last["validation"], **last["also"]})

    @property
    def upgrades(self) -> list[str]:
        """Return a line for each set of the last evaluation that another network described too."""
        last = self.validations[-1] if self.validations else {}
        return [
            f"{name}: {line}"
            for name, figures in last.get("also", {}).items()
            for line in upgrade_lines(figures)
        ]

    @property
    def train_seconds(self) -> float:
        """Return the seconds of the whole training, including evaluations and checkpoints."""
        # Only the lines of steps have a whole, `step`, next to its parts.
        seconds = [entry["seconds"] for entry in self.entries]
        return sum(times["step"] if "step" in times else sum(times.values()) for times in seconds)

    @property
    def outside_network_share(self) -> float | None:
        """Return the share of step time spent outside the network's forward and backward.

        None without steps.
        """
        step_seconds = sum(entry["seconds"]["step"] for entry in self.steps)
        network = sum(entry["seconds"]["network"] for entry in self.steps)
        return 1 - network / step_seconds if step_seconds else None

    @property
    def ranks(self) -> str:
        """Return the number of steps on each number of ranks, in the order of the training."""
        parts = groupby(self.steps, key=lambda entry: int(entry["ranks"]))
        counts = [(len(list(steps)), ranks) for ranks, steps in parts]
        return ", ".join(
            f"{steps:,} on {ranks} rank{'' if ranks == 1 else 's'}" for steps, ranks in counts
        )

    def summary(self) -> dict[str, Any]:
        sets = {
            name: {when: _main_figures(evaluation) for when, evaluation in of_set.items()}
            for name, of_set in self.evaluations().items()
        }
        return {
            "before": _main_figures(next(iter(self.before.values()), None)),
            "after": _main_figures(next(iter(self.after.values()), None)),
            **({"sets": sets} if len(sets) > 1 else {}),
            "train_seconds": self.train_seconds,
            "outside_network_share": self.outside_network_share,
        }

    def evaluations(self) -> dict[str, dict[str, Evaluation]]:
        """Return the evaluations of each data set, as `before` and `after`, or by step within the
        training.
        """
        last = self.recipe["steps"] or max((entry["step"] for entry in self.steps), default=None)
        names = {0: "before", last: "after"}
        by_set = dict[str, dict[str, Evaluation]]()
        for evaluations in (self.before, self.after):
            for name, evaluation in evaluations.items():
                of_set = by_set.setdefault(name, {})
                for earlier in of_set.values():
                    if earlier.fingerprint != evaluation.fingerprint:
                        raise DistapError(
                            "data.changed",
                            f"{earlier.folder} and {evaluation.folder} are of different data: they"
                            " cannot be compared",
                        )
                of_set[names.get(evaluation.step, f"step {evaluation.step}")] = evaluation
        return by_set


def _main_figures(evaluation: Evaluation | None) -> dict[str, float] | None:
    if evaluation is None:
        return None
    figures = evaluation.figures
    return {name: figures[name] for name in SUMMARY_FIGURES if name in figures}


def read_run(folder: Path) -> Run:
    """Read a run's folder, with its first and its newest evaluations."""
    entries = read_run_log(folder)
    path = folder / "recipe.yaml"
    with reading(path, "distap train"):
        recipe = parsed_yaml(read_text(path), str(path))
        recipe |= {key: recipe[key] for key in SECTIONS}
    # An evaluation that the log does not know is from before an interruption.
    logged = {entry["step"] for entry in entries if "validation" in entry}
    steps = [step for step in saved_steps(folder) if step in logged]
    before = dict[str, Evaluation]()
    after = dict[str, Evaluation]()
    if steps and (steps[0] == 0 or len(steps) > 1):
        before = read_evaluations(folder_of_step(folder, steps[0]))
    if steps and steps[-1] > 0:
        after = read_evaluations(folder_of_step(folder, steps[-1]))
    return Run(folder, recipe, entries, before, after, read_starts(folder))
