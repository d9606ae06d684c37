"""The loop around the step: data, schedule, checkpoints, evaluation, metrics."""

import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from distap.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from distap.config import RandomWeights, Recipe, recipe_from
from distap.data.decoding import REASONS
from distap.data.index import load_index
from distap.data.loading import ShareOfBatch, SlotImages, training_shares
from distap.data.plan import Classes, Plan
from distap.data.reading import Reader
from distap.data.transforms import training_transform
from distap.distributed import World
from distap.engine import ENGINES, Engine
from distap.errors import DistapError
from distap.evaluation import evaluate, refuse_seen_classes
from distap.model import RetrievalNetwork, build_network
from distap.optimisation import LinearDecay, build_optimizer
from distap.ranking import AP_LOSSES, CrossBatchMemory
from distap.step import StepResult, ThreeStageStep
from distap.stopwatch import Stopwatch
from distap.telemetry.metrics import TrainingMetrics, host_memory_peak
from distap.telemetry.runlog import RunLog
from distap.telemetry.terminal import TrainingProgress, training_progress

CHECKPOINT_FORMAT = 1
ALWAYS_TOLERATED = 10  # damaged images: a share of a first small batch says little
PARTS = ("backbone", "pooling", "head")  # of the network, each with settings of the optimiser
logger = logging.getLogger("distap")


class Trainer:
    """One training of a recipe on one rank; every rank makes one.

    Args:
        recipe: what to train.
        world: the ranks.
    Raises:
        DistapError: the recipe does not fit the data, the ranks or an earlier state of the run.
    """

    def __init__(self, recipe: Recipe, world: World) -> None:
        self.recipe, self.world = recipe, world
        self.is_first = world.rank == 0
        self.index = load_index(recipe.data.train)
        self.reader = Reader(recipe.data.train, self.index, recipe.data.max_pixels)
        self.plan = Plan(Classes(self.index.label, self.index.class_group), recipe.sampling, recipe.seed)
        self._check()
        self.network = network_of(recipe, world).train()
        self.engine = self._engine()
        self.schedule = LinearDecay(recipe.optimizer.learning_rate, recipe.optimizer.warmup, recipe.steps)
        self.stopwatch = Stopwatch.of(world.device)
        self.step = ThreeStageStep(
            self.engine,
            recipe.listwise_loss,
            world,
            recipe.seed,
            recipe.step.replay_size,
            recipe.step.describe_size,
            mode=recipe.step.ranking,
            ranking_memory=recipe.step.ranking_memory,
            memory=CrossBatchMemory(recipe.memory.size),
            memory_after=recipe.memory.after,
            max_drift=recipe.step.max_replay_drift,
            stopwatch=self.stopwatch,
        )
        self.metrics = TrainingMetrics(self.is_first, world.size, self.plan.size, REASONS)
        self.done = 0  # steps behind the present state
        self.damaged: set[str] = set()  # what and why, on this rank
        self.skipped_images = 0  # on all ranks, since this process started; one met again counts again

    def train(self) -> None:
        """Train to the last step, from the newest checkpoint where there is one."""
        self._resume()
        self._agree_on_start()
        if self.done >= self.recipe.steps:
            logger.info("%s: all %d steps are done already", self.recipe.run, self.recipe.steps)
            return
        with self._telemetry() as (log, progress):
            lap = time.perf_counter()
            first = self.done
            for share in self._shares():
                result = self.step(share, self.schedule.at(share.step))
                self.done = share.step + 1
                self._refuse_too_much_damage(share, images=(self.done - first) * self.plan.size)
                self._report(share, result, log, progress, time.perf_counter() - lap)
                if self._is_due(self.recipe.evaluation.every):
                    self._evaluate(log)
                if self._is_due(self.recipe.checkpoint.every):
                    self._save(log)
                lap = time.perf_counter()

    def _shares(self) -> Iterator[ShareOfBatch]:
        data, step = self.recipe.data, self.recipe.step
        transform = training_transform(data.image_size, data.augmentation)
        return training_shares(
            SlotImages(self.reader, self.plan, transform, data.image_size),
            self.world.slots(self.plan.size),
            range(self.done, self.recipe.steps),
            step.describe_size or step.replay_size,
            data.workers,
            data.prefetch,
            self.stopwatch,
            pinned=self.world.device.type == "cuda",
        )

    def _is_due(self, every: int) -> bool:
        """What is done every so many steps is done after the last one as well."""
        return every > 0 and (self.done % every == 0 or self.done == self.recipe.steps)

    def _check(self) -> None:
        data = self.recipe.data
        if self.plan.size < self.world.size:
            raise DistapError(
                f"sampling gives {self.plan.size} images a batch, fewer than the {self.world.size} ranks; "
                "each rank needs at least one"
            )
        if data.validation is not None:
            validation = load_index(data.validation)
            if data.unseen_classes:
                refuse_seen_classes(self.index, validation, data.validation)

    def _engine(self) -> Engine:
        optimizer = self.recipe.optimizer
        parts = {part: (getattr(self.network, part), getattr(optimizer, part)) for part in PARTS}
        return ENGINES[self.recipe.engine](
            self.network, build_optimizer(optimizer.name, parts, optimizer.betas), self.world, optimizer.clip_norm
        )

    @contextmanager
    def _telemetry(self) -> Iterator[tuple[RunLog | None, TrainingProgress]]:
        """The run folder's files on rank 0, the terminal, and this rank's metrics endpoint."""
        recipe = self.recipe
        with ExitStack() as stack:
            log = None
            if self.is_first:
                recipe.run.mkdir(parents=True, exist_ok=True)
                (recipe.run / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
                log = RunLog(recipe.run, self.done)
                stack.callback(log.close)
            if recipe.metrics.port is not None:
                server = self.metrics.serve(recipe.metrics.port + self.world.local_rank, recipe.metrics.address)
                stack.callback(server.server_close)
                stack.callback(server.shutdown)
            yield log, stack.enter_context(training_progress(recipe.steps, self.done, self.is_first))

    def _report(
        self, share: ShareOfBatch, result: StepResult, log: RunLog | None, progress: TrainingProgress, seconds: float
    ) -> None:
        """Metrics, the run's log and the progress bar."""
        parts = dict(self.stopwatch.seconds)
        self.stopwatch.seconds.clear()
        network = parts.pop("network")
        times = {**parts, "other": seconds - sum(parts.values()), "step": seconds, "network": network}
        for row in result.not_finite:
            where = self.reader.where(share.samples[row])
            logger.warning("step %d: the descriptor of %s is not finite; it is left out", self.done, where)
        if result.skipped:
            logger.warning(
                "step %d: the %s is not finite; the parameters stay as they are", self.done, result.skipped
            )
        figures = {
            "loss": result.loss,
            "batch_mAP": 1 - result.loss if self.step.loss.name in AP_LOSSES else math.nan,
            "learning_rate": result.learning_rate,
            "gradient_norm": result.gradient_norm,
            "replay_drift": result.replay_drift,
            "skipped_queries": result.skipped_queries,
        }
        self.metrics.observe_step(self.done, len(share.samples), times, figures, result.skipped)
        speed = self.plan.size / seconds
        if log is not None:
            log.write(
                {
                    "step": self.done,
                    "time": time.time(),
                    **figures,
                    "images": self.plan.size,
                    "ranks": self.world.size,
                    "images_per_second": speed,
                    "skipped_images": self.skipped_images,
                    "memory_peak_bytes": host_memory_peak(),
                    "seconds": {name: round(value, 6) for name, value in times.items()},
                }
            )
        progress.show(self.done, f"loss {result.loss:.4f}  {speed:.0f} images/s")

    def _refuse_too_much_damage(self, share: ShareOfBatch, images: int) -> None:
        """Count and name the damaged images; past the limit, over the `images` read by all ranks, stop."""
        for failure in share.failures:
            name = f"{failure.where}: {failure.reason}"
            self.metrics.skipped.labels(failure.reason).inc()
            if name not in self.damaged:
                logger.warning("step %d: %s left out", self.done, name)
            self.damaged.add(name)
        self.skipped_images += int(self.world.sum(torch.tensor(len(share.failures), device=self.world.device)))
        limit = self.recipe.data.max_damaged
        if self.skipped_images > max(limit * images, ALWAYS_TOLERATED):
            raise DistapError(
                f"{self.recipe.data.train}: {self.skipped_images} of {images} images are damaged, more than "
                f"data.max_damaged ({limit}) allows; this rank met "
                + (", ".join(sorted(self.damaged)[:10]) or "none of them")
            )

    def _evaluate(self, log: RunLog | None) -> None:
        started = time.perf_counter()
        folder = self.recipe.data.validation
        assert folder is not None
        self._agree_on_statistics()
        data, evaluation = self.recipe.data, self.recipe.evaluation
        figures = evaluate(
            self.network,
            folder,
            self.world,
            image_size=data.image_size,
            batch_size=evaluation.batch_size,
            workers=data.workers,
            max_pixels=data.max_pixels,
        ).result.summary()
        self.metrics.validation.labels(str(folder)).set(figures["mAP"])
        logger.info(
            "step %d: validation %s", self.done, "  ".join(f"{name} {100 * f:.1f}" for name, f in figures.items())
        )
        if log is not None:
            seconds = {"evaluation": time.perf_counter() - started}
            log.write({"step": self.done, "time": time.time(), "validation": figures, "seconds": seconds})

    def _save(self, log: RunLog | None) -> None:
        started = time.perf_counter()
        self._agree_on_statistics()
        if self.is_first:
            state = {
                "format": CHECKPOINT_FORMAT,
                "step": self.done,
                "engine": self.engine.state_dict(),
                "memory": self.step.memory.state_dict(),
                "schedule": dataclasses.asdict(self.schedule),
                "identity": self._identity(),
                "recipe": self.recipe.model_dump(mode="json"),
            }
            checkpoints = self.recipe.run / "checkpoints"
            try:
                path = save_checkpoint(checkpoints, self.done, state, self.recipe.checkpoint.keep)
            except OSError as error:
                self.metrics.checkpoint_failures.inc()
                raise DistapError(f"{checkpoints}: the checkpoint cannot be written: {error}") from error
            seconds = time.perf_counter() - started
            self.metrics.observe_checkpoint(seconds, sum(file.stat().st_size for file in path.iterdir()))
            if log is not None:
                log.write({"step": self.done, "time": time.time(), "seconds": {"checkpoint": seconds}})
        self.world.barrier()

    def _identity(self) -> dict[str, Any]:
        """What must not change within a run, since the state would mean something else."""
        recipe = self.recipe.model_dump(mode="json")
        return {
            "data.train": self.index.fingerprint,
            "seed": self.recipe.seed,
            "sampling": recipe["sampling"],
            "model": recipe["model"],
            "loss": recipe["loss"],
            "engine": self.recipe.engine,
            # The optimiser's state brings these along; rate, warm-up and steps may change.
            **{f"optimizer.{key}": recipe["optimizer"][key] for key in ("name", "betas", *PARTS)},
        }

    def _resume(self) -> None:
        if not list_checkpoints(self.recipe.run / "checkpoints"):
            return
        path = find_checkpoint(self.recipe.run)
        state = load_checkpoint(path)
        for name, value in self._identity().items():
            if state["identity"][name] != value:
                raise DistapError(
                    f"{path}: the run was started with another {name}: {state['identity'][name]}, now {value}; "
                    "choose another run folder, or go back to it"
                )
        self.engine.load_state_dict(state["engine"])
        if "memory" in state:  # runs from before there was one go on without
            self.step.memory.load_state_dict(state["memory"])
        self.done = int(state["step"])
        if state["schedule"] != dataclasses.asdict(self.schedule):
            logger.warning("%s: the schedule has changed since: it was %s", path, state["schedule"])
        logger.info("going on from %s", path)

    def _agree_on_start(self) -> None:
        """Refuse ranks that see different data, or different checkpoints."""
        if not self.world.all_same(int(self.index.fingerprint[:12], 16)):
            raise DistapError(
                f"{self.recipe.data.train}: the ranks see different data; "
                f"rank {self.world.rank} has fingerprint {self.index.fingerprint[:12]}"
            )
        if not self.world.all_same(self.done):
            raise DistapError(
                f"{self.recipe.run}: the ranks see different checkpoints; rank {self.world.rank} would go on from "
                f"step {self.done}. The run folder has to be one that all hosts share"
            )

    def _agree_on_statistics(self) -> None:
        """With BatchNorm by micro-batch, each rank has its own running statistics: take their mean."""
        for statistic in self.network.running_statistics():
            self.world.sum(statistic).div_(self.world.size)


def network_of(recipe: Recipe, world: World) -> RetrievalNetwork:
    """The recipe's network on this rank's device, the same on every rank."""
    model = recipe.model
    torch.manual_seed(recipe.seed)
    return build_network(
        model.backbone,
        model.weights.model_dump(),
        model.pooling.model_dump(),
        model.projection,
        model.batchnorm,
        model.drop_rate,
        model.drop_path_rate,
    ).to(world.device)


def trained_network(path: Path, world: World) -> tuple[Recipe, RetrievalNetwork]:
    """The recipe and network of a checkpoint, or of a run folder's newest one.

    Raises:
        DistapError: there is no checkpoint, or it is corrupt.
    """
    checkpoint = find_checkpoint(path)
    state = load_checkpoint(checkpoint)
    recipe = recipe_from(state["recipe"], str(checkpoint))
    untrained = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": RandomWeights()})})
    network = network_of(untrained, world)
    network.load_state_dict(state["engine"]["network"])
    return recipe, network
