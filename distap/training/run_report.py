"""Report a running training to metrics, the run's log, loggers and the terminal."""

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import yaml

from distap.checkpoint.agreement import on_rank_0
from distap.checkpoint.writer import Written
from distap.config.recipe import Recipe
from distap.data.images.damage import REASONS
from distap.data.loading.share import ShareOfBatch
from distap.errors import CAUSES, COLLAPSED, DistapError, logger
from distap.evaluation.saved import Evaluation, folder_of_step, save_evaluations, saved_steps
from distap.evaluation.upgrade import upgrade_lines
from distap.registry import name_of
from distap.stopwatch import Stopwatch
from distap.telemetry import runlog
from distap.telemetry.endpoint import Endpoint
from distap.telemetry.metrics import TrainingMetrics, device_memory, host_memory_peak
from distap.telemetry.terminal import aligned, origin, progress, rows_of_sets
from distap.training.by_set import SetFigures
from distap.training.learner import StepResult
from distap.training.run_state import Figures, score_of
from distap.training.schedule import Length
from distap.world import World

COLLAPSED_STEPS = 5  # in a row with a spread below COLLAPSED, after which a warning is logged
# Fields of a StepResult that are logged and are metrics.
STEP_FIGURES = (
    "loss",
    "learning_rate",
    "gradient_norm",
    "spread",
    "replay_drift",
    "loss_scale",
)
NAMED_IMAGES = 10  # images of a step that are named if their descriptors are not finite


class RunReport:
    """Report one rank's training; rank 0 writes the files of the run's folder.

    `batch` is the number of images of a global batch.
    """

    def __init__(self, recipe: Recipe, world: World, batch: int, endpoint: Endpoint) -> None:
        self.recipe = recipe
        self.world = world
        self.batch = batch
        self.endpoint = endpoint
        self.metrics = TrainingMetrics(
            world.rank == 0, REASONS, endpoint.registry, world.device.type
        )
        self.metrics.ranks.set(world.size)
        self.metrics.batch.set(batch)
        if recipe.data.validation is not None:
            self.metrics.chosen_by.labels(str(recipe.best.set), recipe.best.figure).set(1)
        self.steps = recipe.steps or 1  # until `plan`, which counts those of epochs
        self.metrics.planned_steps.set(self.steps)
        self.damaged: set[str] = set()  # this rank's damaged images, each with the reason
        self._traffic = Counter[str]()  # of this rank, since the start
        # Damaged images of all ranks since this process started; one met twice counts twice.
        self.skipped_images = 0
        self._collapsed = 0  # steps in a row whose descriptors were all alike
        self._outlets: list[Callable[[dict[str, Any]], None]] = []  # of rank 0: its log, loggers
        self.loggers = {name_of("logger", chosen): chosen for chosen in recipe.loggers}
        # Rank 0 alone needs them, but all ranks leave alike, so that no host starts again.
        if self.loggers:
            on_rank_0(world, partial(runlog.prepare_loggers, self.loggers))

    def plan(self, length: Length) -> None:
        """Take over how many steps the training has, and how often it writes a checkpoint."""
        section = self.recipe.checkpoint
        self.steps = length.steps
        self.metrics.planned_steps.set(self.steps)
        self.metrics.checkpoint_interval.set(length.in_steps(section.every, section.unit))

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Open the log and the loggers of a run that continues from `step`."""
        is_first = self.world.rank == 0
        self.metrics.step.set(step)
        self.metrics.checkpoint_step.set(step)
        origin.step = step
        with ExitStack() as stack:
            if is_first:
                self._open_outlets(step, stack)
            self._show = stack.enter_context(
                progress("step", self.steps, step, is_first, seconds=0)
            )
            yield
        if is_first:
            self._log_traffic()

    def _open_outlets(self, step: int, stack: ExitStack) -> None:
        """Write the recipe into the run's folder; open its log and, until `stack` ends, loggers."""
        recipe = self.recipe
        settings = recipe.model_dump(mode="json")
        device = self.world.device
        try:
            recipe.run.mkdir(parents=True, exist_ok=True)
            (recipe.run / "recipe.yaml").write_text(yaml.safe_dump(settings))
            runlog.cut_run_log(recipe.run, step)
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            runlog.log_start(recipe.run, step, ranks=self.world.size, steps=self.steps, device=name)
        except OSError as error:
            raise DistapError(
                "run.not_writable", f"run: {recipe.run}: the folder cannot be written to: {error}"
            ) from error
        self._outlets = [partial(runlog.append_line, recipe.run / runlog.RUN_LOG)]
        if self.loggers:
            run = runlog.LoggedRun(recipe.run, recipe.run_id, settings, step)
            self._outlets.append(stack.enter_context(runlog.opened_loggers(self.loggers, run)))

    def step(
        self,
        step: int,
        share: ShareOfBatch,
        result: StepResult,
        by_set: Mapping[str, SetFigures],
        stopwatch: Stopwatch,
        seconds: float,
    ) -> None:
        """Report a step, counted from 1, and clear the stopwatch that timed its stages.

        `by_set` has the figures of each data set, if there are several.
        """
        if result.not_finite:
            logger.warning(
                "step %d: %d descriptors are not finite; their images are left out: %s",
                step,
                len(result.not_finite),
                ", ".join(share.names[row] for row in result.not_finite[:NAMED_IMAGES]),
            )
        self._warn_if_collapsed(step, result)
        network = stopwatch.seconds.pop("network")  # within other stages
        times = {
            **stopwatch.seconds,
            "other": seconds - sum(stopwatch.seconds.values()),
            "step": seconds,
            "network": network,
        }
        stopwatch.seconds.clear()
        is_ap = getattr(self.recipe.loss, "is_ap", False)
        figures = {
            **{name: getattr(result, name) for name in STEP_FIGURES},
            "batch_mAP": 1 - result.loss if is_ap else math.nan,
            "replayed_share": result.replayed / self.batch,
            "kept_share": result.kept / self.batch,
        }
        self.metrics.observe_step(step, len(share.samples), times, figures, result.skipped)
        self.metrics.skipped_queries.inc(result.skipped_queries)
        # Entries of the log that not every training has.
        extra: dict[str, Any] = device_memory(self.world.device)
        speed = self.batch / seconds
        text = f"loss {result.loss:.4f}"
        if by_set:
            text += f" ({', '.join(self._report_sets(by_set))})"
            extra["sets"] = {name: of_set._asdict() for name, of_set in by_set.items()}
        text += f"  {speed:.3g} images/s"
        if "device_memory" in extra:
            text += f"  {extra['device_memory']['peak'] / 1e9:.3g} GB"
        self._write(
            step,
            **figures,
            skipped_queries=result.skipped_queries,
            images=self.batch,
            ranks=self.world.size,
            images_per_second=speed,
            reading=dict(share.traffic),
            skipped_images=self.skipped_images,
            memory_peak_bytes=host_memory_peak(),
            seconds={name: round(value, 6) for name, value in times.items()},
            **extra,
        )
        self._show(step, text, loss=result.loss, images_per_second=speed)

    def _report_sets(self, by_set: Mapping[str, SetFigures]) -> Iterator[str]:
        """Export the figures of each data set; yield its name with its loss."""
        for name, of_set in by_set.items():
            self.metrics.set_images.labels(name).inc(of_set.images)
            self.metrics.set_skipped.labels(name).inc(of_set.damaged)
            self.metrics.set_loss.labels(name).set(of_set.loss)
            yield f"{name} {of_set.loss:.4f}"

    def _warn_if_collapsed(self, step: int, result: StepResult) -> None:
        # From descriptors that are all alike no ranking can be learnt, and nothing else would show
        # it. A few steps may be so by chance; the warning comes once.
        self._collapsed = self._collapsed + 1 if result.spread < COLLAPSED else 0
        if self._collapsed == COLLAPSED_STEPS:
            logger.warning(
                "step %d: the network has given all images the same descriptor in %d steps (spread"
                " %.1g) and learns nothing; losses of steps, such as sup_ap, take similarities this"
                " near for ties. Usual causes: %s; go on from an earlier checkpoint",
                step,
                COLLAPSED_STEPS,
                result.spread,
                CAUSES,
            )

    def reading(self, step: int, share: ShareOfBatch) -> None:
        """Report on reading this rank's share of a step: damaged images, and traffic."""
        for failure in share.failures:
            name = ": ".join(failure)
            self.metrics.skipped.labels(failure.reason.partition(":")[0]).inc()
            if name not in self.damaged:
                logger.warning("step %d: left out: %s", step, name)
            self.damaged.add(name)
        traffic = dict(share.traffic)
        self.metrics.cache_wait.inc(traffic.pop("cache_wait_ms", 0) / 1000)
        for name, amount in traffic.items():
            getattr(self.metrics, name).inc(amount)
        self._traffic += share.traffic

    def _log_traffic(self) -> None:
        """Log what rank 0 has read, and what a cache has spared it."""
        traffic = self._traffic
        images = traffic["cache_hits"] + traffic["cache_misses"]
        if not traffic["requests"] and not images:
            return
        line = (
            f"rank 0 read {traffic['read_bytes'] / 1e9:,.3f} GB in {traffic['requests']:,} requests"
        )
        if images:
            line += (
                f"; {traffic['cache_hits'] / images:.1%} of its images came from data.cache, for"
                f" whose shards workers waited {traffic['cache_wait_ms'] / 1000:.1f} s in all"
            )
        logger.info("%s", line)

    def checkpoint(self, written: Written) -> None:
        """Report a checkpoint that was written, or could not be."""
        if self.world.rank != 0:
            return
        if written.error is not None:
            self.metrics.checkpoint_failures.inc()
            logger.error(
                "%s: the checkpoint cannot be written: %s; the one before, if any, stays the"
                " newest",
                written.where,
                written.error,
            )
            return
        self.metrics.checkpoint_step.set(written.step)
        self.metrics.stage_seconds.labels("checkpoint").observe(written.blocked_seconds)
        self.metrics.checkpoint_seconds.observe(written.seconds)
        self.metrics.checkpoint_bytes.set(written.bytes)
        self.metrics.checkpoint_time.set_to_current_time()
        self._write(
            written.step,
            seconds={"checkpoint": written.blocked_seconds},
            writing_seconds=written.seconds,
            bytes=written.bytes,
        )

    def evaluation(
        self,
        step: int,
        evaluated: dict[str, Evaluation],
        figures: Figures,
        seconds: float,
    ) -> None:
        """Report an evaluation after a step, by data set.

        Keep them for a page. Training continues if the disk is full.
        """
        self.metrics.stage_seconds.labels("evaluation").observe(seconds)
        for name, values in figures.items():
            for figure, value in values.items():
                self.metrics.evaluation.labels(name, figure).set(value)
        if len(figures) == 1:
            [(name, values)] = figures.items()
            shown = "  ".join(f"{figure} {100 * value:.1f}" for figure, value in values.items())
            logger.info("step %d: %s %s", step, name, shown)
        else:
            for line in aligned(rows_of_sets(figures)):
                logger.info("step %d: %s", step, line)
        for name, values in figures.items():
            for line in upgrade_lines(values):
                logger.info("step %d: %s: %s", step, name, line)
        recipe = self.recipe
        also = {name: figures[name] for name in figures if name != str(recipe.data.validation)}
        self._write(
            step,
            validation=figures.get(recipe.headline, {}),
            **({"also": also} if also else {}),
            score={recipe.scored_by: score_of(figures, recipe)},
            seconds={"evaluation": seconds},
        )
        run = recipe.run
        try:
            if self.world.rank == 0:
                folder = folder_of_step(run, step)
                save_evaluations(folder, evaluated, network=str(run), step=step)
                # A report compares the first with the newest.
                for earlier in {*saved_steps(run)[1:]} - {step}:
                    shutil.rmtree(folder_of_step(run, earlier), ignore_errors=True)
        except DistapError as error:
            logger.warning("step %d: the evaluation is not kept for the report: %s", step, error)

    def since_best(self, step: int, evaluations: int) -> None:
        """Report how many evaluations in a row have not raised the best score."""
        self.metrics.since_best.set(evaluations)
        patience = self.recipe.evaluation.patience
        if patience is None:
            return
        self._write(step, since_best=evaluations, seconds={})
        if evaluations:
            logger.info(
                "step %d: %s has not risen in %d of %d evaluations (evaluation.patience)",
                step,
                self.recipe.scored_by,
                evaluations,
                patience,
            )

    def _write(self, step: int, **entry: Any) -> None:
        for write in self._outlets:
            write({"step": step, "time": time.time(), **entry})
