"""Search with Optuna for better settings of a recipe, in short trials on held-out classes."""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from distap.apps.advice import RECIPE_TEMPLATES
from distap.apps.looking import HELD_OUT, LEAST_TO_HOLD_OUT
from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER
from distap.checkpoint.lease import Lease
from distap.config.reading import changed_settings, load_recipe, parsed_yaml
from distap.config.recipe import Recipe
from distap.data.shards.index import load_index
from distap.errors import FINISHED, DistapError, first_cause
from distap.pages.page import write_page
from distap.processes.forks import last_error, start_training
from distap.registry import by_path
from distap.storage.atomic import write_whole
from distap.storage.files import Storage
from distap.storage.locations import part_of
from distap.storage.texts import open_regular, read_text
from distap.telemetry.runlog import RUN_LOG, read_run_log
from distap.telemetry.terminal import print_progress
from distap.training.schedule import Length

SPACE_FILE = "space.yaml"
TUNED = "recipe.yaml"
TUNING_PAGE = "tuning.html"
DATABASE = "trials.db"  # of Optuna
OF_THE_DATABASE = (OSError, StorageInternalError, SQLAlchemyError, sqlite3.Error)
# Lengths within a training, which scale with its own.
SCALED = ("schedule.warmup", "schedule.milestones", "optimizer.head_only")
FIGURE = "mAP"  # of the held-out classes, to maximise
RUNGS = 4  # evaluations of a trial; successive halving ends a poor one after the first or second
LOOK_SECONDS = 0.5
REPEATS = "repeats"  # mark of a trial with the values of another
MOST_REPEATED = 50  # such trials in a row end the search


def opened_database(path: Path) -> RDBStorage:
    """Open or make a database of trials; raise a ValueError if there is no regular file."""
    if path.exists():
        open_regular(path).close()
    # A URL of SQLAlchemy would read `?` and `%` of the path as signs of its own, so SQLite gets the
    # path itself.
    connect = partial(sqlite3.connect, path.absolute(), check_same_thread=False)
    return RDBStorage(f"sqlite:///{DATABASE}", engine_kwargs={"creator": connect})


def _distribution(values: Any) -> tuple[BaseDistribution, list[str]]:
    """Return what to draw from, and values of it as YAML; raise an error if it is neither kind."""
    if isinstance(values, list):
        texts = [
            yaml.safe_dump(value, default_flow_style=True, width=999).split("\n")[0]
            for value in values
        ]
        return CategoricalDistribution(texts), texts
    low = float(values["low"])  # numbers such as 1e-5 are text in YAML
    high = float(values["high"])
    return FloatDistribution(**{**values, "low": low, "high": high}), [str(low), str(high)]


@dataclass
class Tuning:
    """A search for settings, kept in a folder, from which it continues.

    Raises:
        DistapError: the recipe cannot be tuned, or a key or a value of the space is wrong.
    """

    config: Path
    overrides: list[str]
    folder: Path
    file: Path  # of the values to search; a new file gets the default ones
    share: float  # of the recipe's cost that a trial takes
    ranks: int

    def __post_init__(self) -> None:
        self.settings = changed_settings(self.config, self.overrides)
        self.recipe = load_recipe(self.settings, where=str(self.config))
        self.index = load_index(self.recipe.data.train_source)
        count = self.index.classes.count
        if count < LEAST_TO_HOLD_OUT:
            raise DistapError(
                "data.too_few_classes",
                f"{self.recipe.data.train_name}: {count} classes, of which none can be held out;"
                f" expected at least {LEAST_TO_HOLD_OUT}",
            )
        load_recipe(self.of_trial({}, self.folder), where=f"{self.config}, in a trial")
        if not self.file.exists():
            space = RECIPE_TEMPLATES.get_template(SPACE_FILE).render(
                written=self.settings,
                recipe=self.recipe,
                train=self.index.of_classes(0, 1 - HELD_OUT),
            )
            write_whole(self.file, space)
        try:
            text = read_text(self.file)
        except (OSError, ValueError) as error:
            raise DistapError("tune.unreadable", f"{self.file}: cannot be read: {error}") from error
        self.space = self.parsed_space(text)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # Another space, recipe or share begins another study.
        name = sha256(repr((text, self.settings, self.share)).encode()).hexdigest()
        # Whatever fails here fails because of the database's content.
        with self.keeping((Exception,)):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.study = optuna.create_study(
                storage=opened_database(self.folder / DATABASE),
                study_name=name,
                load_if_exists=True,
                direction="maximize",
                pruner=optuna.pruners.SuccessiveHalvingPruner(reduction_factor=2),
            )
            self.study.get_trials()

    @contextmanager
    def keeping(self, kinds: tuple[type[Exception], ...] = OF_THE_DATABASE) -> Iterator[None]:
        """Raise a DistapError that names the database in place of errors of these kinds."""
        try:
            yield
        except DistapError:
            raise
        except kinds as error:
            cause = first_cause(error)  # SQLite's, in one line
            reason = str(getattr(cause, "strerror", None) or cause) or type(cause).__name__
            raise DistapError(
                "tune.database",
                f"{self.folder / DATABASE}: the trials cannot be kept there:"
                f" {reason.splitlines()[0]}; if the disk has room and nothing else has it open,"
                " move it away to begin the search anew",
            ) from error

    def parsed_space(self, text: str) -> dict[str, BaseDistribution]:
        """Parse the values to search by recipe key: a list of values, or a range."""
        file = str(self.file)
        values_by_key = parsed_yaml(text, file)
        if not isinstance(values_by_key, dict) or not values_by_key:
            raise DistapError(
                "tune.space",
                f"{file}: expected recipe keys, each with a list of values or with low and high",
            )
        space = dict[str, BaseDistribution]()
        for key, values in values_by_key.items():
            try:
                space[key], examples = _distribution(values)
            except (TypeError, ValueError, KeyError) as error:
                raise DistapError(
                    "tune.space",
                    f"{file}: {key}: {error}; expected a list, or low, high and perhaps log",
                ) from error
            for value in examples:
                load_recipe(changed_settings(self.settings, [f"{key}={value}"]), where=file)
        return space

    def with_values(self, values: dict[str, Any], share: float) -> dict[str, Any]:
        """Return the recipe's settings with other values by key, and a share of its length.

        Its steps see this share of the pixels that the recipe's own steps see.
        """
        settings = changed_settings(
            self.settings, [f"{key}={value}" for key, value in values.items()]
        )
        recipe = load_recipe(settings, where=str(self.config))
        full_steps, pixels = self.cost(recipe)
        recipe_steps, recipe_pixels = self.cost(self.recipe)
        steps = RUNGS * max(1, round(share * recipe_steps * recipe_pixels / pixels / RUNGS))
        lengths = dict(by_path(recipe.model_dump(mode="json"), "."))
        scaled = {
            key: (steps / full_steps * np.array(lengths[key])).tolist()
            for key in SCALED
            if lengths.get(key)
        }
        return changed_settings(settings, [{"steps": steps, **scaled}])

    def cost(self, recipe: Recipe) -> tuple[int, float]:
        """Return the number of steps, and the pixels of a batch, in the mean over the steps."""
        begins, sizes = np.array([*recipe.data.sizes, (1, 0)]).T
        batch = recipe.sampling.size
        pixels = batch * np.diff(begins) @ sizes[:-1] ** 2
        return Length(recipe, self.index, batch).steps, float(pixels)

    def of_trial(self, values: dict[str, Any], run: Path) -> dict[str, Any]:
        """Return settings that hold a share of the classes out of training, for evaluations."""
        settings = self.with_values(values, self.share)
        every = settings["steps"] // RUNGS
        train = str(self.recipe.data.train)
        changes: dict[str, Any] = {
            "run": str(run),
            "data.train": part_of(train, 0, 1 - HELD_OUT),
            "data.validation": part_of(train, 1 - HELD_OUT, 1),
            "data.gallery": None,
            "evaluation": {
                "every": every,
                "unit": "steps",
                "at_start": False,
                "figures": [FIGURE],
                "merged": False,
                "best": None,
            },
            "checkpoint": {"every": every, "unit": "steps", "keep": 1, "store": None},
        }
        return changed_settings(
            settings,
            [changes, "evaluation.also={}", "loggers=[]", "metrics.port=null"],
        )

    def search(self, minutes: float) -> None:
        """Run trials, the first with the recipe as it is, while there is time.

        Raises:
            DistapError: no trial came to its end, or another search runs in the folder.
        """
        self.end = time.monotonic() + 60 * minutes
        lease = Lease("--output", Storage(str(self.folder)), "search", "remove the file lease.json")
        lease.take()
        try:
            with self.keeping():
                self.search_until_the_end()
        finally:
            lease.release()
        if not self.study.best_trials:
            raise DistapError(
                "tune.no_trial",
                f"{self.folder}: no trial came to its end: {self.row(self.study.trials[-1])[-1]}",
            )

    def search_until_the_end(self) -> None:
        """Run interrupted trials again, the recipe as it is, and others while there is time."""
        for interrupted in self.study.get_trials(states=[TrialState.RUNNING]):
            self.study.tell(interrupted.number, state=TrialState.FAIL)
            self.try_one(interrupted.params)  # it continues from its checkpoint
        if all(trial.params for trial in self.study.get_trials(states=[TrialState.COMPLETE])):
            self.try_one({})
        repeated = 0
        keys = cycle(self.space)
        while time.monotonic() < self.end and repeated < MOST_REPEATED:
            # A change of the best so far: of few trials with values of all keys at random, hardly
            # one is as good.
            best = self.study.best_params if self.study.best_trials else {}
            key = next(keys)
            best.pop(key, None)
            repeated = 0 if self.try_one(best, key) else repeated + 1

    def try_one(self, held: dict[str, Any], key: str | None = None) -> bool:
        """Run a trial with these values and Optuna's of a further key; write recipe and page.

        Return False if it was run before.
        """
        self.study.enqueue_trial(held)
        keys = held if key is None else (*held, key)
        asked = self.study.ask({name: self.space[name] for name in keys})
        alike = [trial for trial in self.study.trials if trial.params == asked.params]
        if any(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in alike):
            asked.set_user_attr(REPEATS, True)
            self.study.tell(asked, state=TrialState.FAIL)
            return False
        # An interrupted trial has the same values, and continues in its run.
        first = alike[0].number
        run = self.folder / "trials" / self.study.study_name / str(first)
        try:
            trial = self.train(asked, run)
        except DistapError as error:
            asked.set_user_attr("problem", str(error))
            trial = self.study.tell(asked, state=TrialState.FAIL)
        shutil.rmtree(run / CHECKPOINTS_FOLDER, ignore_errors=True)
        rows = [self.row(shown) for shown in (trial, *self.study.best_trials)]
        minutes = max(0, self.end - time.monotonic()) / 60
        print_progress(
            f"trial {', '.join(rows[0])}; best: trial {', '.join(rows[-1])}; {minutes:.0f} minutes"
            " left"
        )
        if self.study.best_trials:
            self.write()
        return True

    def train(self, trial: Trial, run: Path) -> FrozenTrial:
        """Train in other processes; end early if other trials were better at the same point."""
        file = run / "trial.yaml"
        log = run / "output.log"
        scores = list[float]()
        running = True
        write_whole(file, yaml.safe_dump(self.of_trial(trial.params, run)))
        process = start_training(file, self.ranks, log)
        try:
            while running:
                # Before the log is read, so that a last round reads the lines before the end.
                running = process.poll() is None
                entries = read_run_log(run) if (run / RUN_LOG).exists() else []
                for entry in [entry for entry in entries if "validation" in entry][len(scores) :]:
                    scores.append(entry["validation"][FIGURE] or 0.0)  # null is not finite
                    trial.report(scores[-1], len(scores))
                if len(scores) < RUNGS and trial.should_prune():
                    return self.study.tell(trial, state=TrialState.PRUNED)
                time.sleep(LOOK_SECONDS * running)
        finally:
            process.terminate()  # it writes a checkpoint
            process.wait()
        if process.returncode != FINISHED:
            raise DistapError(
                "tune.trial_failed", f"status {process.returncode}: {last_error(log)} ({log})"
            )
        return self.study.tell(trial, scores[-1])

    def write(self) -> None:
        """Write the recipe of the best values, with their reasons, and a page about all trials."""
        complete = sorted(
            self.study.get_trials(states=[TrialState.COMPLETE]),
            key=lambda trial: -(trial.value or 0),
        )
        settings = self.with_values(complete[0].params, share=1)
        settings["run"] = f"{self.recipe.run}-tuned"
        headings = ["trial", *self.space, FIGURE]
        rows = [
            self.row(trial)
            for trial in self.study.trials
            if trial.state.is_finished() and REPEATS not in trial.user_attrs
        ]
        recipe = RECIPE_TEMPLATES.get_template("tuned.yaml").render(
            config=self.config,
            headings=headings,
            rows=rows,
            whole=[*map(self.row, complete)],
            settings=yaml.safe_dump(settings, sort_keys=False),
        )
        write_whole(self.folder / TUNED, recipe)
        write_page(
            self.folder / TUNING_PAGE,
            "tuning.html",
            config=self.config,
            headings=headings,
            rows=rows,
            recipe=recipe,
        )

    def row(self, trial: FrozenTrial) -> list[str]:
        """Return a trial's number, its values, and its figure in percent, or why there is none."""
        values = [trial.params.get(key, "as it was") for key in self.space]
        shown = [f"{value:.3g}" if isinstance(value, float) else value for value in values]
        if trial.value is None:
            return [str(trial.number), *shown, trial.user_attrs.get("problem", "interrupted")]
        early = "ended early at " if trial.state == TrialState.PRUNED else ""
        return [str(trial.number), *shown, f"{early}{100 * trial.value:.1f}"]
