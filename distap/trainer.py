"""The order of a run: resume, evaluate, then for each step train, report, evaluate and save.

`Trainer.train` reads from top to bottom; `distap.training` prepares its parts, keeps its state and
reports it.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from distap.config.evaluation_sections import MERGED
from distap.config.recipe import Recipe
from distap.data.loading.share import ShareOfBatch
from distap.errors import CAUSES, FINISHED, RESTART, DistapError, logger
from distap.evaluation.describing import describing_of, describing_of_set
from distap.evaluation.evaluation_set import DescribedSet
from distap.evaluation.extraction.extracting import BrokenOffError
from distap.evaluation.several_sets import evaluate_merged, with_mean
from distap.processes.stopping import StopRequest
from distap.stages.sizes import kept_graphs
from distap.storage.remotes import UnreachableError
from distap.telemetry.endpoint import Endpoint
from distap.telemetry.terminal import origin, set_up_run_logging
from distap.telemetry.tracing import traced
from distap.training.announcement import announce
from distap.training.by_set import counts_by_set, figures_by_set, set_names
from distap.training.prepared import Prepared, prepare
from distap.training.run_state import Figures, score_of
from distap.world import World, joined_world

TRACES = "traces"
# Share of the images of one batch that may be damaged. More are, for instance, if a store fails.
MOST_DAMAGED_OF_BATCH = 0.25
# Damaged images that never stop a training, since a share of a small first batch says little.
ALWAYS_TOLERATED = 10


@contextmanager
def trained(recipe: Recipe) -> Iterator[int]:
    """Train on this process's rank, alone or as one of torchrun's ranks; yield the exit status.

    Inside the `with` block the ranks are still joined.
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    set_up_run_logging(recipe.logs.format, recipe.run_id, rank)
    port = None if recipe.metrics.port is None else recipe.metrics.port + local_rank
    # The endpoint comes first: the ranks may wait for each other for minutes, in which probes need
    # an answer.
    with (
        Endpoint(rank).served(port, recipe.metrics.address) as endpoint,
        joined_world(recipe.timeout_seconds, recipe.device) as world,
    ):
        trainer = Trainer(prepare(recipe, world, endpoint), world)
        status = trainer.train()
        if rank == 0 and trainer.ended is not None:
            endpoint.wait_for_scrape(trainer.ended)
        yield status


class Trainer:
    """The training loop as one rank runs it."""

    def __init__(self, prepared: Prepared, world: World) -> None:
        self.prepared = prepared
        self.world = world
        self.recipe = prepared.recipe
        self.report = prepared.report
        self.images = prepared.images
        self.sets = set_names(prepared.images)  # names of several data sets
        self.network = prepared.network
        self.step = prepared.step
        self.learner = prepared.step.learner
        self.state = prepared.state
        self.done = 0  # steps that have led to the present parameters
        self._saved = 0  # steps that have led to the newest checkpoint
        self.not_finite = 0  # steps in a row whose loss or gradient was not finite
        self.ended: float | None = None  # time.monotonic() when it was done or began to stop

    def train(self) -> int:
        """Train from the newest checkpoint, if any, to the last step, and return FINISHED.

        If a rank is asked to stop, write a checkpoint and return RESTART.
        """
        prepared = self.prepared
        steps = prepared.length.steps
        with self.state.leased(), StopRequest(self.recipe.stop.grace_seconds) as stop:
            self.done = self._saved = self.state.resume()
            if prepared.is_begun and self.done == 0:
                raise DistapError(
                    "checkpoint.removed",
                    f"{self.recipe.run}: its checkpoints were removed meanwhile; start the training"
                    " again",
                )
            # A process that was asked to stop leaves the evaluation that was due to the next one.
            owes_evaluation = (
                self.done > 0 and self._is_evaluation_due() and self.state.score is None
            )
            if (self.done >= steps or self.ends_early) and not owes_evaluation:
                logger.info(
                    "%s: %s",
                    self.recipe.run,
                    self._ended_early or f"all {steps} steps are done already",
                )
                self._report_ending("done")
                return FINISHED
            announce(prepared, self.done, self.world.device, self.world.size)
            with self.report.opened(self.done), self.report.endpoint.ready(lambda: stop.requested):
                at_start = self.recipe.evaluation.at_start and bool(prepared.sets)
                if owes_evaluation or (self.done == 0 and at_start):
                    figures = self.evaluate(stop)
                    if figures is None:
                        logger.warning(
                            "stopped before the evaluation after step %d was done", self.done
                        )
                        self._report_ending("stopped")
                        return RESTART
                    if owes_evaluation:
                        self._save_if_due(figures)
                return self._train(stop)

    def _train(self, stop: StopRequest) -> int:
        if self.ends_early:  # by the evaluation that was owed
            return self._finish()
        first = self.done
        stopping = False
        tracing = False
        length = self.prepared.length
        folder = self.recipe.run / TRACES
        for share in self._shares(stop):
            # Mining, an evaluation and a checkpoint do not count for the next step.
            lap = time.perf_counter()
            origin.step = share.step + 1
            # At first only the head moves.
            self.learner.held = ("backbone",) if share.step < length.head_only else ()
            with traced(folder, self.world.rank, share.step + 1) if tracing else nullcontext():
                result = self.step(share, length.rate(share.step))
            self.done = share.step + 1

            by_set = counts_by_set(self.sets, share, result)
            stopping, tracing = self._agree_on_requests(
                share, stop, by_set, images=(self.done - first) * self.images.size
            )
            figures = figures_by_set(self.sets, by_set, result.loss)
            if self.state.weights is not None:
                self.state.weights.observe(figures, result.loss)
            if self.done == first + 1:
                self._after_first_step(share)
            self.report.step(
                self.done,
                share,
                result,
                figures,
                self.images.stopwatch,
                seconds=time.perf_counter() - lap,
            )
            self._report_checkpoints()
            self._count_not_finite(result.skipped)

            stopping = self._evaluate_and_save(stop, stopping)
            if stopping or self.ends_early:
                break
        return self._finish(stopping)

    def _shares(self, stop: StopRequest) -> Iterator[ShareOfBatch]:
        """Yield this rank's shares of the remaining steps.

        Mine every `sampling.every` steps; weigh data sets every `sampling.follow_loss` steps.
        """
        steps = self.prepared.length.steps
        nearest = self.state.nearest
        weights = self.state.weights
        while self.done < steps:
            if weights is not None and self.done and self.done % weights.every == 0:
                weights.renew(self.done)
            if nearest is not None and self.done % nearest.every == 0:
                self.world.note(f"mining after step {self.done}")
                self._average_statistics()
                try:
                    with self.learner.replica.whole():
                        describing = describing_of(self.recipe, self.network, self.world)
                        nearest.renew(replace(describing, is_asked_to_stop=lambda: stop.requested))
                except BrokenOffError:  # it is mined after the restart
                    if self.done != self._saved:
                        self._save()
                    return
            # Up to the next multiple of each interval, also after a restart in between, which has
            # its checkpoint's tables.
            intervals = [table.every for table in (nearest, weights) if table is not None]
            end = min([(self.done // every + 1) * every for every in intervals] + [steps])
            yield from self.images.shares(range(self.done, end), steps)

    def _finish(self, stopping: bool = False) -> int:
        """Export how the training ends, wait for its last checkpoint, and return the status."""
        steps = self.prepared.length.steps
        is_early = self.ends_early and not stopping
        owes_evaluation = stopping and self._is_evaluation_due()
        is_stopped = not is_early and (self.done < steps or owes_evaluation)
        # Before the last checkpoint is written, which takes a while: no alert is to take the
        # training for lost.
        self._report_ending("stopped" if is_stopped else "done")
        self._finish_checkpoint()
        if is_stopped:
            saved = ", with a checkpoint" if self.done else ""
            logger.warning("stopped after step %d of %d%s", self.done, steps, saved)
            return RESTART
        reason = self._ended_early if is_early else f"all {steps} steps are done"
        logger.info("%s: %s", self.recipe.run, reason)
        return FINISHED

    @property
    def ends_early(self) -> bool:
        """Return whether the best score has not risen for evaluation.patience evaluations."""
        return self.state.since_best >= (self.recipe.evaluation.patience or math.inf)

    @property
    def _ended_early(self) -> str:
        """Return in words why the training ended before its last step, "" if it did not."""
        if not self.ends_early:
            return ""
        return (
            f"ended after step {self.done} of {self.prepared.length.steps}, since"
            f" {self.recipe.scored_by} has not risen in {self.state.since_best} evaluations"
            " (evaluation.patience); the best checkpoint stays"
        )

    def _is_evaluation_due(self) -> bool:
        prepared = self.prepared
        return bool(prepared.sets) and prepared.length.is_due(self.recipe.evaluation, self.done)

    def _after_first_step(self, share: ShareOfBatch) -> None:
        """Choose how many graphs to keep, if that is `auto`, and log the time since the start."""
        replica = self.learner.replica
        count = len(share.present)
        if self.recipe.keep == "auto" and replica.keeps_graphs:
            sizes = self.step.stages.sizes
            images = share.images(slice(0, min(sizes.images, count))).to(self.world.device)
            sizes.keep = kept_graphs(replica, self.world, images, count)
        seconds = time.perf_counter() - self.prepared.started
        logger.info("the first step was done after %.1f s of preparation", seconds)

    def _agree_on_requests(
        self, share: ShareOfBatch, stop: StopRequest, by_set: Tensor, images: int
    ) -> tuple[bool, bool]:
        """Return whether any rank was asked to stop, and whether any was asked to trace.

        One sum per step carries all that a rank may know alone: damaged images, a request to stop
        or to trace, a lost lease, and the counts `by_set`, which become those of all ranks. So all
        ranks act after the same step, or raise together.
        """
        self.report.reading(self.done, share)
        problem = self.state.lease.problem
        requests = [len(share.failures), stop.requested, stop.trace_asked, problem != ""]
        stop.trace_asked = False
        counts = torch.cat([torch.tensor(requests, dtype=torch.float64), by_set.flatten()])
        counts = self.world.sum(counts.to(self.world.device)).cpu()
        by_set.copy_(counts[len(requests) :].view_as(by_set))
        damaged, stopping, tracing, lost = map(int, counts[: len(requests)].tolist())
        if lost:
            raise DistapError(
                "run.taken_over",
                problem or "another training has taken this run over; rank 0 says which one",
            )
        if damaged:
            self._count_damaged(damaged, images)
        return bool(stopping), bool(tracing)

    def _count_damaged(self, damaged: int, images: int) -> None:
        """Add the damaged images of a step; raise a DistapError if there are too many."""
        self.report.skipped_images += damaged
        data = self.recipe.data
        for key, count, total, limit in (
            ("data.max_damaged", self.report.skipped_images, images, data.max_damaged),
            ("one batch", damaged, self.images.size, MOST_DAMAGED_OF_BATCH),
        ):
            if count > max(limit * total, ALWAYS_TOLERATED):
                raise DistapError(
                    "data.too_many_damaged",
                    f"{data.train_name}: {count} of {total} images are damaged, more than {key}"
                    f" ({limit}) allows; this rank met "
                    + (", ".join(sorted(self.report.damaged)[:10]) or "none of them"),
                )

    def _count_not_finite(self, problem: str | None) -> None:
        """Count a step that was not applied, since its descriptor, loss or gradient was not finite.

        One such step may be bad luck; many in a row will not end by themselves.
        """
        if problem is None:
            self.not_finite = 0
            return
        if problem == "overflow":  # a smaller loss scale may mend it
            return
        self.not_finite += 1
        logger.warning(
            "step %d: the %s is not finite; the parameters stay as they are", self.done, problem
        )
        if self.not_finite >= self.recipe.step.max_not_finite:
            raise DistapError(
                "run.not_finite",
                f"step {self.done}: the {problem} was not finite in {self.not_finite} steps in a"
                f" row (step.max_not_finite). Usual causes: {CAUSES}",
            )

    def _evaluate_and_save(self, stop: StopRequest, stopping: bool) -> bool:
        """Evaluate and write a checkpoint if they are due; return whether the training stops here.

        After a request to stop, an evaluation may take longer than the grace time: the next start
        makes up for it.
        """
        figures = None
        if self._is_evaluation_due() and not stopping:
            figures = self.evaluate(stop)
            stopping = figures is None
        if stopping:
            self._save()
        else:
            self._save_if_due(figures)
        return stopping

    def evaluate(self, stop: StopRequest) -> Figures | None:
        """Evaluate on all sets.

        Returns rank 0's figures on every rank, or None if a rank was asked to stop.
        """
        started = time.perf_counter()
        self.world.note(f"evaluation after step {self.done}")
        self._average_statistics()
        described = dict[str, DescribedSet]()
        try:
            with self.learner.averaged(), self.learner.replica.whole():
                for name, images in self.prepared.sets.items():
                    describing = describing_of_set(self.recipe, name, self.network, self.world)
                    described[name] = images.describe(
                        replace(describing, is_asked_to_stop=lambda: stop.requested)
                    )
        except BrokenOffError:
            return None
        evaluated = {name: images.evaluate() for name, images in described.items()}
        if self.recipe.evaluation.merged:
            evaluated[MERGED] = evaluate_merged(described)
        # Which checkpoint is the best must not depend on the last bit of a sum, which may differ
        # between ranks.
        figures: Figures = self.world.gather_values(
            with_mean({name: evaluation.figures for name, evaluation in evaluated.items()})
        )[0]
        self.report.evaluation(self.done, evaluated, figures, time.perf_counter() - started)
        return figures

    def _save_if_due(self, figures: Figures | None) -> None:
        is_needed = False  # whatever the schedule says
        if figures is not None:
            # What counts as the best is written: the ranks must agree on that.
            self.state.writer.wait()
            is_best = score_of(figures, self.recipe) > self.state.writer.best
            # Counted before the checkpoint, which must know it to go on exactly.
            self.state.since_best = 0 if is_best else self.state.since_best + 1
            self.report.since_best(self.done, self.state.since_best)
            is_needed = is_best or self.ends_early
        if is_needed or self.prepared.length.is_due(self.recipe.checkpoint, self.done):
            self._save(figures)

    def _save(self, figures: Figures | None = None) -> None:
        self.world.note(f"checkpoint after step {self.done}")
        self._average_statistics()
        self.state.save(self.done, figures)
        self._saved = self.done

    def _report_checkpoints(self) -> None:
        while self.state.writer.outcomes:
            self.report.checkpoint(self.state.writer.outcomes.popleft())

    def _finish_checkpoint(self) -> None:
        """Wait for the last checkpoint, without which the run is not complete."""
        written = self.state.writer.wait()
        self._report_checkpoints()
        if written is not None and written.error is not None:
            message = f"{written.where}: the last checkpoint cannot be written: {written.error}"
            if written.may_pass:
                raise UnreachableError("checkpoint.not_written", message)
            raise DistapError("checkpoint.not_written", message)

    def _report_ending(self, reason: str) -> None:
        """Export that the training is done, or stops on request."""
        self.report.metrics.ended.labels(reason).set(1)
        self.ended = time.monotonic()

    def _average_statistics(self) -> None:
        # With model.batchnorm `batch` each rank has seen other micro-batches, and would evaluate
        # another network.
        if self.network.batchnorm != "batch":
            return
        for name, statistic in self.network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                self.world.sum(statistic).div_(self.world.size)
