"""Save the state of a run, and resume from it after an interruption."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

import distap
from distap.checkpoint.agreement import on_all, on_rank_0
from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER, Checkpoint, Checkpoints, FilesBeside
from distap.checkpoint.finding import newest_checkpoint
from distap.checkpoint.lease import TAKE_OVER, Lease
from distap.checkpoint.writer import CheckpointWriter
from distap.config.recipe import Recipe
from distap.data.joined import MixedIndex
from distap.data.loading.indexed import IndexedImages
from distap.data.loading.share import TrainingImages
from distap.data.sampling import MinedSampling
from distap.errors import CAUSES, DistapError, logger
from distap.evaluation.saved import FOLDER as EVALUATIONS
from distap.evaluation.saved import SET_FOLDER
from distap.model.backbone import built_again
from distap.registry import SOURCES, by_path
from distap.storage.files import Storage
from distap.telemetry.runlog import RUN_LOG, STARTS_LOG
from distap.training.by_set import FollowedWeights, set_names
from distap.training.learner import Learner, TrainingStep, without_prefix
from distap.training.mining import NearestClasses
from distap.world import World, local

# Files of the run folder that go to a store together with checkpoints.
BESIDE = (
    "recipe.yaml",
    RUN_LOG,
    STARTS_LOG,
    f"{EVALUATIONS}/*/*",
    f"{EVALUATIONS}/*/{SET_FOLDER}*/*",
    "loggers/*",
    "tensorboard/*",
)
Figures = dict[str, dict[str, float]]  # by data set, the validation set first
# Keys of `optimizer` on which its state does not depend.
MAY_CHANGE = ("learning_rate", "clip_norm", "head_only")
# Settings that hosts may give differently; whether they have the same data is compared apart.
HOSTS_OWN: dict[str, Any] = {
    **dict.fromkeys(("run", "logs", "metrics"), True),
    "data": {
        **dict.fromkeys(("train", "rows", "validation", "gallery"), True),
        **dict.fromkeys(("workers", "prefetch", "pixels", "requests"), True),
        # All hosts have a cache, or none.
        "cache": {"folder", "bytes"},
    },
}


def require_same(recipe: Recipe, world: World) -> None:
    """Raise a DistapError on all ranks if one has another distap or recipe, but for HOSTS_OWN."""
    excluded: dict[str, Any] = HOSTS_OWN
    if isinstance(recipe.data.train, Mapping):  # of which hosts may have copies in other places
        places = {name: {"data", "rows"} for name in recipe.data.train}
        excluded = HOSTS_OWN | {"data": HOSTS_OWN["data"] | {"train": places}}
    names = [*(recipe.data.validation_sets if isinstance(recipe.data.validation, dict) else ())]
    names += recipe.evaluation.also
    settings = {
        "distap": distap.__version__,
        # All ranks describe the same set at a time.
        "evaluation sets": names,
        "data.rows": recipe.data.row_names,  # whose folders may be elsewhere
        **recipe.model_dump(mode="json", exclude=excluded),
    }
    of_rank_0 = world.gather_values(settings)[0]
    differences = "; ".join(_differences(of_rank_0, settings, "{}: {} on rank 0, {} here"))
    problem = None
    if differences:
        problem = DistapError(
            "ranks.other_recipe", f"not what rank 0 trains: {differences}; start all hosts alike"
        )
    world.agreed(problem, (), None)


def is_begun(recipe: Recipe, world: World) -> bool:
    """Return whether the run has a checkpoint to resume from."""
    return bool(on_rank_0(world, Checkpoints(_storage_of(recipe)).names))


def score_of(figures: Figures, recipe: Recipe) -> float:
    """Return the figure of evaluation.best, by which checkpoints are compared.

    One of a part without a query is not a number, and is 0 here.
    """
    best = recipe.best
    score = figures[str(best.set)][best.figure]
    return score if math.isfinite(score) else 0.0


def _storage_of(recipe: Recipe) -> Storage:
    """Return the folder or store that holds the run's checkpoints."""
    return Storage(recipe.checkpoint.store or str(recipe.run))


class RunState:
    """State of a training on one rank: in memory, and in checkpoints on disk or in a store.

    `rows` are the fingerprints of data.rows, by their keys.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        images: TrainingImages,
        step: TrainingStep,
        rows: Mapping[str, str],
    ) -> None:
        self.recipe = recipe
        self.world = world
        self.images = images
        self.rows = rows
        self.learner = step.learner
        self.nearest: NearestClasses | None = None
        if isinstance(images, IndexedImages) and isinstance(recipe.sampling, MinedSampling):
            self.nearest = NearestClasses(images, recipe.sampling)
        self.weights: FollowedWeights | None = None
        follow_loss = getattr(recipe.sampling, "follow_loss", None)
        if isinstance(images, IndexedImages) and follow_loss is not None and set_names(images):
            self.weights = FollowedWeights(images, follow_loss)
        # Objects with a state next to the learner, by the prefix of the names of their tensors.
        holders = {
            "memory": step.stages.memory,
            "loss": step.loss_learner,
            "mined": self.nearest,
            "weights": self.weights,
        }
        self._holders = {prefix: holder for prefix, holder in holders.items() if holder is not None}
        self._settings = recipe.model_dump(mode="json")
        # Score of the checkpoint that the run goes on from, if that was evaluated.
        self.score: float | None = None
        # Evaluations in a row that have not raised the best score.
        self.since_best = 0
        section = recipe.checkpoint
        storage = _storage_of(recipe)
        self.lease = Lease("run" if section.store is None else "checkpoint.store", storage)
        self.checkpoints = Checkpoints(storage)
        self._spool = recipe.run / CHECKPOINTS_FOLDER
        # Hosts that use a store need not share the run's folder.
        self.beside = FilesBeside(storage, recipe.run, BESIDE if section.store is not None else ())
        self.writer = CheckpointWriter(
            self.checkpoints, world, section.keep, recipe.timeout_seconds, self._spool, self.beside
        )

    @contextmanager
    def leased(self) -> Iterator[None]:
        """Keep other trainings out of the run's folder and store.

        Raises:
            DistapError: one is there, or the ranks do not share the place of the checkpoints.
        """
        is_first = self.world.rank == 0
        try:
            training = on_rank_0(self.world, self.lease.take)
            on_all(self.world, lambda: self.lease.require_seen(training))
            yield
        finally:
            if is_first:
                self.lease.release()

    def resume(self) -> int:
        """Load the newest undamaged checkpoint, if any; return its number of steps."""
        with newest_checkpoint(self.checkpoints, self._spool, self.world) as checkpoint:
            if checkpoint is None:
                return 0
            self._take_over(checkpoint)
            # Later scores are compared with rank 0's, so that the ranks agree on which one is
            # better.
            on_rank_0(self.world, self.beside.fetch)
            scored_by = self.recipe.scored_by
            score = on_rank_0(self.world, lambda: self.checkpoints.best(scored_by)[0])
            self.writer.best = float("-inf") if score is None else score
        return checkpoint.step

    def save(self, step: int, figures: Figures | None = None) -> None:
        """Start to write a checkpoint, once the one before is written.

        Args:
            figures: of the evaluation after this step, if there was one.
        Raises:
            DistapError: on all ranks, if the state is not finite, for no training could go on from
                it.
        """
        tensors = self.learner.state_dict()
        for prefix, holder in self._holders.items():
            tensors |= {f"{prefix}.{name}": each for name, each in holder.state_dict().items()}
        lost = [
            name for name, tensor in tensors.items() if not bool(local(tensor).isfinite().all())
        ]
        if not self.world.all_agree(not lost):
            self.writer.wait()  # for the one before, which stays
            raise DistapError(
                "checkpoint.not_finite",
                f"step {step}: {', '.join(lost[:3]) or 'the state of another rank'} is not finite,"
                " so no checkpoint is written; the newest one before it stays. Usual causes:"
                f" {CAUSES}",
            )
        state: dict[str, Any] = {
            "step": step,
            "recipe": self._settings,
            "folder": str(Path.cwd()),  # that the recipe's paths are relative to
            "figures": figures or {},
            "since_best": self.since_best,
            "user": os.environ.get("USER", ""),
        }
        if self.recipe.model.architecture.startswith(tuple(SOURCES)):
            state["backbone"] = built_again(self.learner.network.backbone)
        identity: dict[str, Any] = {
            "data": self._fingerprints,
            "rows": self.rows,
            "order": self.images.order,
        }
        score = None
        if figures:
            score = score_of(figures, self.recipe)
            identity["scored_by"] = self.recipe.scored_by
        self.writer.save(step, tensors, state, identity, score)

    def _shard_of(self, name: str, shape: torch.Size) -> Tensor | None:
        """Return `Learner.shard_of` of the network's learner, or of the loss's."""
        prefix, _, path = name.partition(".")
        if prefix not in self._holders:
            return self.learner.shard_of(name, shape)
        holder = self._holders[prefix]
        return holder.shard_of(path, shape) if isinstance(holder, Learner) else None

    @property
    def _fingerprints(self) -> str | dict[str, str]:
        """The fingerprint of the data, or that of each of several data sets by name."""
        index = self.images.index
        if isinstance(index, MixedIndex):
            return {name: of_set.fingerprint for name, of_set in index.sets.items()}
        return self.images.fingerprint

    def _take_over(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state("recipe")
        recorded = state["recipe"]
        self._refuse_other_run(recorded["run"], state.get("user", ""), checkpoint.where)
        identity = checkpoint.manifest.about
        before = _identity(recorded, identity.get("data"), identity.get("rows", {}))
        now = _identity(self._settings, self._fingerprints, self.rows)
        changed = _differences(before, now)
        if changed:
            raise DistapError(
                "run.other_recipe",
                f"{checkpoint.where}: the run was started with another recipe; choose another run"
                " folder, or go back to it:\n" + "\n".join(f"  {line}" for line in changed),
            )
        order = identity.get("order")
        if order != self.images.order:
            raise DistapError(
                "run.other_plan",
                f"{checkpoint.where}: the run draws batches by version {order} of the plan, and"
                f" this distap by version {self.images.order}: finish it with the distap that began"
                " it; or start a new run from its weights, with model.weights={name: run, path: "
                + f"{self.recipe.run}}}",
            )
        # The learner comes last: a memory or a loss of another kind is found before parameters are
        # replaced.
        tensors = checkpoint.tensors(shard_of=self._shard_of)
        try:
            for prefix, holder in self._holders.items():
                holder.load_state_dict(without_prefix(f"{prefix}.", tensors))
            self.learner.load_state_dict(tensors)
        except (RuntimeError, KeyError, ValueError) as error:
            # Torch names the tensors that are missing, unexpected or of another shape, a line for
            # each kind.
            lines = [shorten(line, 200) for line in str(error).splitlines()[:6]]
            raise DistapError(
                "run.other_network",
                f"{checkpoint.where}: it is of another network or loss: {' '.join(lines)}; choose"
                " another run folder, or go back to the network that the run began with",
            ) from error
        self.score = checkpoint.manifest.score
        self.since_best = int(state.get("since_best", 0))
        for line in _differences(recorded, self._settings):
            logger.warning("%s: the recipe has changed since: %s", checkpoint.where, line)
        logger.info("going on from %s", checkpoint.where)

    def _refuse_other_run(self, owner: str, user: str, where: str) -> None:
        """Raise a DistapError if the store belongs to another run, which this one would overwrite.

        Args:
            owner: the run folder as the run that wrote the checkpoint had it. Other hosts may have
                it elsewhere, so its name alone counts.
            user: who started that run; "" if it is not known.
        """
        run = self.recipe.run
        starter = os.environ.get("USER", "")
        is_same_user = starter == user or not (starter and user)
        is_own = Path(owner).name == run.name and is_same_user
        if self.recipe.checkpoint.store is None or is_own or TAKE_OVER in os.environ:
            return
        # Colleagues give different trainings one name.
        users = ("", "") if is_same_user else (f" of {user}", f" of {starter}")
        raise DistapError(
            "run.other_run",
            f"{where}: checkpoint.store belongs to run={owner}{users[0]}, and this is"
            f" run={run}{users[1]}: give each"
            f" run a store of its own; if {run} is to go on from that run and to write over its"
            " checkpoints, start it once with --take-over",
        )


def _identity(recipe: dict[str, Any], fingerprint: Any, rows: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a run cannot change, because its state would change meaning."""
    reading = recipe["data"]["reading"]
    sets = recipe["data"]["train"]
    if isinstance(sets, Mapping):
        fingerprint = {
            name: {"data": fingerprint.get(name), "weight": settings["weight"]}
            for name, settings in sets.items()
        }
    optimizer = recipe["optimizer"]
    return {
        "data.reading": reading,
        "data.train": fingerprint,
        # Next to data.train: `by_path` writes data.rows.teacher.
        "data": {key.removeprefix("data."): fingerprint for key, fingerprint in rows.items()},
        **{name: recipe[name] for name in ("seed", "sampling", "loss")},
        "model": {key: value for key, value in recipe["model"].items() if key != "compile"},
        # The optimiser's state depends on these.
        **{f"optimizer.{key}": optimizer[key] for key in optimizer.keys() - set(MAY_CHANGE)},
    }


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], line: str = "{}: was {}, is {}"
) -> list[str]:
    """Return a line for each setting of `now` that differs, with its key and both values."""
    old = dict(by_path({name: before[name] for name in now if name in before}, "."))
    new = dict(by_path(now, "."))
    changed = {
        key: (old.get(key, "unset"), new.get(key, "unset"))
        for key in old | new
        if old.get(key) != new.get(key)  # a key of a later version is null
    }
    return [
        line.format(
            key, *(value if isinstance(value, str) else json.dumps(value) for value in values)
        )
        for key, values in changed.items()
        if not any(other.startswith(f"{key}.") for other in changed)  # a null that became a section
    ]
