"""Search with Optuna for settings by which a recipe retrieves more, in short trials on held-out classes."""

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from distap.apps.advice import HELD_OUT, LEAST_TO_HOLD_OUT
from distap.apps.search_space import as_yaml, default_space, parsed_space
from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER
from distap.checkpoint.lease import FILE as LEASE_FILE
from distap.checkpoint.lease import Lease
from distap.config.reading import changed_settings, load_recipe, recipe_file
from distap.config.recipe import Recipe
from distap.data.shards.index import load_index
from distap.errors import FINISHED, DistapError
from distap.pages.charts import Chart
from distap.pages.page import write_page
from distap.processes.forks import last_error, start_training
from distap.registry import by_path
from distap.retrieval.figures import figures_named
from distap.storage.atomic import write_whole
from distap.storage.files import Storage
from distap.storage.locations import part_of
from distap.storage.texts import read_text
from distap.telemetry.runlog import RUN_LOG, read_run_log
from distap.telemetry.terminal import tell
from distap.training.schedule import Length

SPACE_FILE, TUNED, TUNING_PAGE = "space.yaml", "recipe.yaml", "tuning.html"
DATABASE, OUTPUT = "trials.db", "output.log"
JUDGED, LEAST_JUDGED = 0.1, 400  # images to judge by: a share of those that a trial trains on, but so many at least
LEAST_CLASSES = 10  # to judge by, of at least LEAST_TO_HOLD_OUT
RUNGS = 4  # evaluations of a trial; successive halving ends a poor one after the first or second
LOOK_SECONDS = 0.5


@dataclass
class Tuning:
    """A search for settings, kept in a folder, from which it goes on.

    Raises:
        DistapError: the recipe cannot be tuned, or a key or a value of the space is wrong.
    """

    config: Path
    overrides: list[str]
    folder: Path
    file: Path | None  # of the values to search; None is a new one in the folder
    share: float  # of the recipe's cost that a trial takes
    ranks: int
    figure: str  # of the held-out classes, which is to become large

    def __post_init__(self) -> None:
        self.settings = changed_settings(recipe_file(self.config), self.overrides)
        self.recipe = load_recipe(self.settings, where=str(self.config))
        self.index = load_index(self.recipe.data.train_source)
        self.images = Length(self.recipe, self.index, self.recipe.sampling.size).steps * self.recipe.sampling.size
        if (count := self.index.classes.count) < LEAST_TO_HOLD_OUT:
            told = f"{count} classes, of which none can be held out to judge trials by"
            raise DistapError(f"{self.recipe.data.train}: {told}; expected at least {LEAST_TO_HOLD_OUT}")
        load_recipe(self.of_trial(self.folder, self.with_values({}, self.share)), where=f"{self.config}, in a trial")
        file = self.file or self.folder / SPACE_FILE
        if self.file is None and not file.exists():
            write_whole(file, default_space(self.recipe, self.index))
        text = read_text(file)
        self.space = parsed_space(text, str(file), self.settings, self.own)
        figures_named([self.figure])  # raises for an unknown one
        self.folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=self.recipe.seed)
        are_lists = all(isinstance(of, CategoricalDistribution) for of in self.space.values())
        # Another search begins anew, with runs of its own.
        name = sha256(repr((text, self.settings, self.share, self.figure)).encode()).hexdigest()[:12]
        self.runs = self.folder / "trials" / name
        self.study = optuna.create_study(
            storage=f"sqlite:///{self.folder / DATABASE}",
            study_name=name,
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.BruteForceSampler() if are_lists else sampler,
            pruner=optuna.pruners.SuccessiveHalvingPruner(reduction_factor=2),
        )

    def own(self, key: str) -> Any:
        """Return the recipe's value of a key, as it is written, or else the default."""
        *parents, last = key.split(".")
        for settings in (self.settings, self.recipe.model_dump(mode="json")):
            held: Any = settings
            for part in parents:
                held = held.get(part) if isinstance(held, dict) else None
            if isinstance(held, dict) and last in held:
                value = held[last]  # a part by its name alone is written in short
                return value["name"] if isinstance(value, dict) and [*value] == ["name"] else value
        return None

    def with_values(self, values: Mapping[str, Any], share: float = 1.0) -> dict[str, Any]:
        """Return the recipe's settings with other values by key, in as many steps as cost `share` of the recipe.

        The cost is the number of pixels that the network sees.
        """
        settings = changed_settings(self.settings, [f"{key}={value}" for key, value in values.items()])
        recipe = load_recipe(settings, where=str(self.config))
        images = share * self.images * mean_pixels(self.recipe) / mean_pixels(recipe)
        changes: dict[str, Any] = {"steps": max(RUNGS, round(images / recipe.sampling.size))}
        by = images / self.images
        # In epochs, lengths shrink with the images that are seen; in steps, also with a batch that has grown.
        if getattr(recipe.schedule, "unit", "steps") == "steps":
            by *= self.recipe.sampling.size / recipe.sampling.size
        written = dict(by_path(settings, "."))
        for key in ("schedule.warmup", "schedule.milestones", "optimizer.head_only"):
            if value := written.get(key):
                changes[key] = [by * each for each in value] if isinstance(value, list) else by * value
        return changed_settings(settings, [changes])

    def search(self, minutes: float) -> None:
        """Run trials, each in processes of its own, while there is time; write recipe and page after each.

        Raises:
            DistapError: no trial came to its end, or another search runs in the folder.
        """
        lease = Lease("--output", Storage(str(self.folder)), "search", f"remove {self.folder / LEASE_FILE}")
        lease.take()
        try:
            for interrupted in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
                self.study.enqueue_trial(interrupted.params)  # which goes on from its checkpoint
                self.study.tell(interrupted.number, state=TrialState.FAIL)
            if not self.study.trials:
                own = {
                    key: as_yaml(self.own(key)) if isinstance(of, CategoricalDistribution) else self.own(key)
                    for key, of in self.space.items()
                }
                self.study.enqueue_trial({key: value for key, value in own.items() if value is not None})
            self.end = time.monotonic() + 60 * minutes
            self.study.optimize(self.score, timeout=60 * minutes, catch=[DistapError], callbacks=[self.report])
            if not self.whole:
                problems = [trial.user_attrs.get("problem", "ended early") for trial in self.study.trials]
                raise DistapError(f"{self.folder}: none of {len(problems)} trials came to its end: {problems[-1]}")
        finally:
            lease.release()

    @property
    def whole(self) -> list[FrozenTrial]:
        """Return the trials that were not ended early, the best first."""
        done = self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        return sorted(done, key=lambda trial: -(trial.value or 0))

    def score(self, trial: Trial) -> float:
        """Train with values that Optuna suggests, and end early if others were better at the same point."""
        for key, of in self.space.items():
            if isinstance(of, FloatDistribution):
                trial.suggest_float(key, of.low, of.high, log=of.log)
            elif isinstance(of, CategoricalDistribution):
                trial.suggest_categorical(key, of.choices)
        settings, score = self.with_values(trial.params, self.share), 0.0
        try:
            for rung, score in enumerate(self.train(self.run_of(trial), settings), 1):
                trial.report(score, rung)
                if rung < RUNGS and trial.should_prune():
                    raise optuna.TrialPruned
        except DistapError as error:
            trial.set_user_attr("problem", str(error))
            raise
        return score

    def run_of(self, trial: Trial | FrozenTrial) -> Path:
        """Return the folder of a trial's run, by its values, so that an interrupted one is gone on with."""
        return self.runs / sha256(repr(sorted(trial.params.items())).encode()).hexdigest()[:12]

    def report(self, _: optuna.Study, trial: FrozenTrial) -> None:
        """Tell of a trial that has ended, and keep its log but not its checkpoints."""
        shutil.rmtree(self.run_of(trial) / CHECKPOINTS_FOLDER, ignore_errors=True)
        named = ", ".join(f"{key} {shown(value)}" for key, value in trial.params.items())
        best = outcome(self.whole[0]) if self.whole else "none yet"
        minutes = max(0, self.end - time.monotonic()) / 60
        tell(f"trial {trial.number}: {named}: {outcome(trial)}; best {best}; {minutes:.0f} minutes left")
        if self.whole:
            self.write()

    def of_trial(self, run: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """Return settings that train on the classes that are not held out, and judge by the others."""
        judged = max(LEAST_JUDGED, JUDGED * self.share * self.images) / len(self.index)
        judged = max(judged, LEAST_CLASSES / self.index.classes.count)
        every, train, first = ceil(settings["steps"] / RUNGS), str(self.recipe.data.train), 1 - HELD_OUT
        of_trial: dict[str, Any] = {
            "run": str(run),
            "data.train": part_of(train, 0, first),
            "data.validation": part_of(train, first, min(1.0, first + judged)),
            "data.gallery": None,
            "evaluation": {"every": every, "unit": "steps", "at_start": False, "figures": [self.figure]},
            "checkpoint": {"every": every, "unit": "steps", "keep": 1, "store": None},
        }
        return changed_settings(settings, [of_trial, "evaluation.also={}", "loggers=[]", "metrics.port=null"])

    def train(self, run: Path, settings: dict[str, Any]) -> Iterator[float]:
        """Train a trial; yield the figure of the held-out classes after each part of the steps."""
        file, log, told, running = run / "trial.yaml", run / OUTPUT, 0, True
        write_whole(file, yaml.safe_dump(self.of_trial(run, settings)))
        process = start_training(file, self.ranks, log)
        try:
            while running:
                # Asked before the log is read, so that lines written just before the end are read in a last round.
                running = process.poll() is None
                entries = read_run_log(run) if (run / RUN_LOG).exists() else []
                scores = [entry["validation"].get(self.figure) for entry in entries if "validation" in entry]
                if None in scores:
                    raise DistapError(f"{self.figure} of the held-out classes is not finite ({log})")
                yield from scores[told:]
                told = len(scores)
                time.sleep(LOOK_SECONDS * running)
        finally:
            process.terminate()  # it writes a checkpoint
            process.wait()
        if process.returncode != FINISHED:
            raise DistapError(f"status {process.returncode}: {last_error(log)} ({log})")

    def write(self) -> None:
        """Write the recipe of the best values, with the reason for each, and a page about all trials."""
        whole, trials = self.whole, [trial for trial in self.study.trials if trial.state.is_finished()]
        about = f"{len(trials)} trials of {self.config}, {len(whole)} of them whole. On held-out classes the best "
        about += f"reached {self.figure} {outcome(whole[0])}" + "".join(
            f", the recipe as it was {outcome(one)}" for one in whole if one.params == trials[0].params
        )
        reasons = [f"{key} {shown(value)}: {self.reason(key)}" for key, value in whole[0].params.items()]
        settings = {**self.with_values(whole[0].params), "run": f"{self.recipe.run}-tuned"}
        recipe = "".join(f"# {line}\n" for line in (about, *reasons)) + yaml.safe_dump(settings, sort_keys=False)
        write_whole(self.folder / TUNED, recipe)
        points = [(trial.number, trial.value) for trial in trials if trial.state == TrialState.COMPLETE]
        chart = Chart(points, self.figure, in_percent=True, marked=True, x_label="trial")
        rows = [
            [str(one.number), *(shown(one.params.get(key, "")) for key in self.space), outcome(one)] for one in trials
        ]
        write_page(
            self.folder / TUNING_PAGE, "tuning.html", title=f"distap: tuning of {self.config}", about=about,
            reasons=reasons, charts={f"{self.figure} of whole trials": chart}, rows=rows, recipe=recipe,
            headings=["trial", *self.space, self.figure],
        )  # fmt: skip

    def reason(self, key: str) -> str:
        """Say what the values of a key reached in whole trials, the best first."""
        found: dict[str, list[str]] = {}
        for trial in self.whole:
            found.setdefault(shown(trial.params[key]), []).append(outcome(trial))
        return "; ".join(f"{value} reached {', '.join(of[:3])}" for value, of in [*found.items()][:4])


def mean_pixels(recipe: Recipe) -> float:
    """Return the pixels of a training image, in the mean over the steps."""
    bounds = [*recipe.data.sizes, (1.0, 0)]
    return sum((end - begin) * size**2 for (begin, size), (end, _) in pairwise(bounds))


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def outcome(trial: FrozenTrial) -> str:
    """Return a trial's figure in percent, or why there is none."""
    if trial.value is None:
        return str(trial.user_attrs.get("problem", "interrupted"))
    return ("" if trial.state == TrialState.COMPLETE else "ended early at ") + f"{100 * trial.value:.1f}"
