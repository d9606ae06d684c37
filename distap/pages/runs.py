"""Read what a training left in its folder: recipe, log and evaluations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.config.parsing import parsed_yaml
from distap.errors import DistapError
from distap.evaluation.saved import Evaluation, folder_of_step, read_evaluation, saved_steps
from distap.storage.texts import read_text
from distap.telemetry.runlog import read_run_log, read_starts

SUMMARY_FIGURES = ("mAP", "mAP@R", "R@1")
SECTIONS = ("data", "loss", "model", "sampling", "steps")  # of a recipe, which a report needs


@dataclass(frozen=True)
class Run:
    folder: Path
    recipe: dict[str, Any]
    entries: list[dict[str, Any]]  # lines of its log
    before: Evaluation | None  # of the network that the training began with
    after: Evaluation | None  # of the network as it is now
    starts: list[dict[str, Any]]  # when, where and with which versions it was started; empty of an older run

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if "loss" in entry]

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Return the log's evaluations, the last of each step; an evaluation before training comes first."""
        lines = {entry["step"]: entry for entry in self.entries if "validation" in entry}
        before = self.before
        if lines and before and not before.step and before.data == str(self.recipe["data"]["validation"]):
            lines.setdefault(0, {"step": 0, "validation": before.figures})
        return [lines[step] for step in sorted(lines)]

    @property
    def train_seconds(self) -> float:
        """Return the seconds of the whole training, including evaluations and checkpoints."""
        # Only the lines of steps have a whole, `step`, next to its parts.
        seconds = [entry["seconds"] for entry in self.entries]
        return sum(each["step"] if "step" in each else sum(each.values()) for each in seconds)

    @property
    def outside_network_share(self) -> float | None:
        """Return the share of step time spent outside the network's forward and backward; None without steps."""
        whole, network = (sum(entry["seconds"][name] for entry in self.steps) for name in ("step", "network"))
        return 1 - network / whole if whole else None

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {
            when: each and {name: each.figures[name] for name in SUMMARY_FIGURES if name in each.figures}
            for when, each in (("before", self.before), ("after", self.after))
        }
        return summary | {"train_seconds": self.train_seconds, "outside_network_share": self.outside_network_share}

    def evaluations(self) -> dict[str, Evaluation]:
        """Return the evaluations as `before` and `after`, or by step within the training."""
        if self.before and self.after and self.before.fingerprint != self.after.fingerprint:
            raise DistapError(
                f"{self.before.folder} and {self.after.folder} are of different data: they cannot be compared"
            )
        last = self.recipe["steps"] or max((entry["step"] for entry in self.steps), default=None)
        names = {0: "before", last: "after", None: ""}
        both = {"before": self.before, "after": self.after}
        return {names.get(each.step, f"step {each.step}") or when: each for when, each in both.items() if each}


def read_run(folder: Path) -> Run:
    """Read a run's folder, with its first and its newest evaluation."""
    entries = read_run_log(folder)
    path = folder / "recipe.yaml"
    try:
        recipe = parsed_yaml(read_text(path), str(path))
    except (OSError, ValueError) as error:
        raise DistapError(f"{path}: the run's recipe cannot be read: {error}") from error
    missing = [key for key in SECTIONS if not isinstance(recipe, dict) or key not in recipe]
    if missing:
        raise DistapError(f"{path}: not the recipe of a run: {', '.join(missing)} missing; a training writes it")
    # An evaluation that the log does not know is from before an interruption.
    known = {entry["step"] for entry in entries if "validation" in entry}
    own = [step for step in saved_steps(folder) if step in known]
    first = folder_of_step(folder, own[0]) if own and (own[0] == 0 or len(own) > 1) else None
    newest = folder_of_step(folder, own[-1]) if own and own[-1] > 0 else None
    begun, ended = (each if each is None else read_evaluation(each) for each in (first, newest))
    return Run(folder, recipe, entries, begun, ended, read_starts(folder))
