"""The order of a run: resume, evaluate, then for each step train, report, evaluate and save.

`Trainer.train` reads from top to bottom; `distap.training` builds its parts, keeps its state and
reports it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from distap.checkpoint.agreement import first_on_rank_0
from distap.config.recipe import Recipe
from distap.data.loading.share import ShareOfBatch
from distap.errors import CAUSES, FINISHED, RESTART, DistapError, logger
from distap.evaluation.evaluation_set import DescribedSet
from distap.evaluation.extraction.extracting import BrokenOffError
from distap.model.backbone import RandomWeights
from distap.processes.stopping import StopRequest
from distap.stages.sizes import kept_graphs
from distap.stopwatch import Stopwatch
from distap.storage.remotes import UnreachableError
from distap.telemetry.endpoint import Endpoint
from distap.telemetry.terminal import origin, set_up_run_logging
from distap.telemetry.tracing import traced
from distap.training.build import (
    describing_of,
    describing_of_set,
    images_of,
    learner_of,
    loss_of,
    step_of,
)
from distap.training.run_report import RunReport
from distap.training.run_state import Figures, RunState, is_begun, require_same, score_of
from distap.training.schedule import Length
from distap.training.start_checks import (
    checked_data,
    checked_network,
    described_once,
    whiten_projection,
)
from distap.world import World, joined_world

TRACES = "traces"
MOST_DAMAGED_OF_BATCH = 0.25  # share of the images, such as those of a store that fails
ALWAYS_TOLERATED = 10  # damaged images, since a share of a small first batch says little


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
        yield Trainer(recipe, world, endpoint).train()


class Trainer:
    """The training of a recipe, seen from one rank; every rank makes a Trainer.

    Args:
        endpoint: answers HTTP requests about this rank; a new one answers nothing until it is
            served. only_check: build all parts, but learn nothing from the images.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        endpoint: Endpoint | None = None,
        only_check: bool = False,
    ) -> None:
        self.recipe = recipe
        self.world = world
        self.endpoint = endpoint or Endpoint(world.rank)
        self._began = time.perf_counter()
        self.endpoint.watchdog = world.watchdog
        require_same(recipe, world)
        # The report comes first, so that metrics show a start that takes long or fails again and
        # again.
        self.report = RunReport(recipe, world, recipe.sampling.size, self.endpoint)
        self.stopwatch = Stopwatch(world.device)
        # Data: what a person may have got wrong is found by rank 0 alone, and told once.
        self.images, self.sets = first_on_rank_0(
            world, partial(checked_data, recipe, world, self.stopwatch)
        )
        world.agreed(None, [self.images.fingerprint[:12]], None, f"data in {recipe.data.train}")
        self.length = first_on_rank_0(
            world, partial(Length, recipe, self.images.index, self.images.size)
        )
        # Network and evaluations, before an engine takes its parameters apart.
        self.is_begun = is_begun(recipe, world)
        # A checkpoint replaces the weights that the run began with, which need not be there any
        # more.
        self.network = checked_network(recipe, world, RandomWeights() if self.is_begun else None)
        if not only_check:
            self.recipe = described_once(recipe, self.network, self.images, world, self.is_begun)
        if self.recipe is not recipe:
            recipe = self.recipe
            self.images = images_of(self.recipe, world, self.stopwatch)
        if not self.is_begun:
            whiten_projection(recipe, self.network, world, only_check)
        self.network.train()
        for name in self.sets:  # raises for images that the network does not take, before it trains
            describing_of_set(recipe, name, self.network, world)
        self.learner = learner_of(recipe, self.network, world)
        # Step: the three stages over this rank's replica, then one update.
        loss = loss_of(recipe, self.images, self.network, world)
        self.step = step_of(recipe, self.learner, loss, world, self.stopwatch)
        self.report.metrics.replay_drift_limit.set(self.step.stages.max_drift)
        self.state = RunState(recipe, world, self.images, self.step)
        # steps that have led to the present parameters, and to the newest checkpoint
        self.done = self._saved = 0
        self.not_finite = 0  # steps in a row whose loss or gradient was not finite

    def train(self) -> int:
        """Train from the newest checkpoint, if any, to the last step, and return FINISHED.

        If a rank is asked to stop, write a checkpoint and return RESTART.
        """
        with self.state.leased(), StopRequest(self.recipe.stop.grace_seconds) as stop:
            self.done = self._saved = self.state.resume()
            if self.is_begun and self.done == 0:
                raise DistapError(
                    f"{self.recipe.run}: its checkpoints were removed meanwhile; start the training"
                    " again"
                )
            owes_evaluation = self.done > 0 and self._owes_evaluation() and self.state.score is None
            if self.done >= self.length.steps and not owes_evaluation:
                logger.info("%s: all %d steps are done already", self.recipe.run, self.length.steps)
                return FINISHED
            self.report.begins(self.done, self.length, self.images, self.network, list(self.sets))
            with self.report.opened(self.done), self.endpoint.ready(lambda: stop.requested):
                at_start = self.recipe.evaluation.at_start and bool(self.sets)
                if owes_evaluation or (self.done == 0 and at_start):
                    figures = self.evaluate(stop)
                    if figures is None:
                        logger.warning(
                            "stopped before the evaluation after step %d was done", self.done
                        )
                        return RESTART
                    # the process before was asked to stop before this evaluation
                    if owes_evaluation:
                        self._save_if_due(figures)
                return self._train(stop)

    def _train(self, stop: StopRequest) -> int:
        first = self.done
        stopping = False
        tracing = False
        steps = self.length.steps
        folder = self.recipe.run / TRACES
        for share in self._shares(stop):
            # mining, an evaluation and a checkpoint do not count for the next step
            lap = time.perf_counter()
            origin.step = share.step + 1
            self.learner.held = ("backbone",) if share.step < self.length.head_only else ()
            with traced(folder, self.world.rank, share.step + 1) if tracing else nullcontext():
                result = self.step(share, self.length.rate(share.step))
            self.done = share.step + 1
            stopping, tracing = self._agree_on_requests(
                share, stop, images=(self.done - first) * self.images.size
            )
            # Only a step shows what optimiser and activations take, and so what is left for kept
            # graphs.
            if self.done == first + 1:
                self._after_first_step(share)
            self.report.step(self.done, share, result, self.stopwatch, time.perf_counter() - lap)
            self._report_checkpoints()
            self.not_finite = 0 if result.skipped is None else self.not_finite + 1
            if result.skipped is not None:
                self._tell_not_finite(result.skipped)
            figures = None
            # After a request to stop, an evaluation may take longer than the grace time: the next
            # start owes it.
            if self._owes_evaluation() and not stopping:
                figures = self.evaluate(stop)
                stopping = figures is None  # the evaluation is done after the restart
            if stopping:
                self._save()
                break
            self._save_if_due(figures)
        self._finish_checkpoint()
        if self.done < steps or (stopping and self._owes_evaluation()):
            kept = ", with a checkpoint" if self.done else ""
            logger.warning("stopped after step %d of %d%s", self.done, steps, kept)
            return RESTART
        logger.info("%s: all %d steps are done", self.recipe.run, steps)
        return FINISHED

    def _shares(self, stop: StopRequest) -> Iterator[ShareOfBatch]:
        """Yield this rank's shares of all steps that are left; every `sampling.every` steps, mine
        first.
        """
        steps = self.length.steps
        nearest = self.state.nearest
        every = steps if nearest is None else self.recipe.sampling.every
        while self.done < steps:
            if nearest is not None and self.done % every == 0:
                self.world.note(f"mining after step {self.done}")
                self._average_statistics()
                try:
                    with self.learner.replica.describing():
                        how = describing_of(self.recipe, self.network, self.world)
                        nearest.renew(replace(how, is_asked_to_stop=lambda: stop.requested))
                except BrokenOffError:  # it is mined after the restart
                    if self.done != self._saved:
                        self._save()
                    return
            # Up to the next multiple of `every`, also after a restart in between, which has its
            # checkpoint's table.
            yield from self.images.shares(
                range(self.done, min((self.done // every + 1) * every, steps)), steps
            )

    def _owes_evaluation(self) -> bool:
        return bool(self.sets) and self.length.is_due(self.recipe.evaluation, self.done)

    def _after_first_step(self, share: ShareOfBatch) -> None:
        """Keep as many graphs as memory allows, if the recipe wants it; log the time since the
        start.
        """
        replica = self.learner.replica
        count = len(share.present)
        if self.recipe.keep == "auto" and replica.keeps_graphs:
            sizes = self.step.stages.sizes
            images = share.images(slice(0, min(sizes.images, count))).to(self.world.device)
            sizes.keep = kept_graphs(replica, self.world, images, count)
        logger.info(
            "the first step was done after %.1f s of preparation", time.perf_counter() - self._began
        )

    def _agree_on_requests(
        self, share: ShareOfBatch, stop: StopRequest, images: int
    ) -> tuple[bool, bool]:
        # One sum per step carries all that a rank may know alone: damaged images, a request to stop
        # or to trace, a lost lease. So all ranks act after the same step, or raise together.
        # Returns whether any was asked to stop, and whether any was asked to trace.
        self.report.reading(self.done, share)
        asked, stop.trace_asked = stop.trace_asked, False
        mine = [len(share.failures), stop.requested, asked, self.state.lease.problem != ""]
        damaged, stopping, tracing, lost = self.world.sum(
            torch.tensor(mine, device=self.world.device)
        ).tolist()
        if lost:
            raise DistapError(
                self.state.lease.problem
                or "another training has taken this run over; rank 0 says which one"
            )
        if damaged:
            self._count_damaged(damaged, images)
        return bool(stopping), bool(tracing)

    def _count_damaged(self, damaged: int, images: int) -> None:
        self.report.skipped_images += damaged
        data = self.recipe.data
        for key, count, of, limit in (
            ("data.max_damaged", self.report.skipped_images, images, data.max_damaged),
            ("one batch", damaged, self.images.size, MOST_DAMAGED_OF_BATCH),
        ):
            if count > max(limit * of, ALWAYS_TOLERATED):
                raise DistapError(
                    f"{data.train}: {count} of {of} images are damaged, more than {key} ({limit})"
                    " allows; this rank met "
                    + (", ".join(sorted(self.report.damaged)[:10]) or "none of them")
                )

    def _tell_not_finite(self, what: str) -> None:
        # One such step may be bad luck and is not applied; many in a row will not end by
        # themselves.
        logger.warning(
            "step %d: the %s is not finite; the parameters stay as they are", self.done, what
        )
        if self.not_finite >= self.recipe.step.max_not_finite:
            raise DistapError(
                f"step {self.done}: the {what} was not finite in {self.not_finite} steps in a row "
                f"(step.max_not_finite). Usual causes: {CAUSES}"
            )

    def evaluate(self, stop: StopRequest) -> Figures | None:
        """Evaluate on all sets; return rank 0's figures on every rank, or None if a rank was asked
        to stop.
        """
        started = time.perf_counter()
        self.world.note(f"evaluation after step {self.done}")
        self._average_statistics()
        try:
            with self.learner.averaged(), self.learner.replica.describing():
                described = dict[str, DescribedSet]()
                for name, images in self.sets.items():
                    how = describing_of_set(self.recipe, name, self.network, self.world)
                    described[name] = images.describe(
                        replace(how, is_asked_to_stop=lambda: stop.requested)
                    )
        except BrokenOffError:
            return None
        evaluated = {name: one.evaluate() for name, one in described.items()}
        # Which checkpoint is the best must not depend on the last bit of a sum, which may differ
        # between ranks.
        figures: Figures = self.world.gather_values(
            {name: each.figures for name, each in evaluated.items()}
        )[0]
        self.report.evaluation(self.done, evaluated, figures, time.perf_counter() - started)
        return figures

    def _save_if_due(self, figures: Figures | None) -> None:
        if figures is not None:  # what counts as the best is written: the ranks must agree on that
            self.state.writer.wait()
        is_best = figures is not None and score_of(figures) > self.state.writer.best
        if self.length.is_due(self.recipe.checkpoint, self.done) or is_best:
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
            kind = UnreachableError if written.may_pass else DistapError
            raise kind(f"{written.where}: the last checkpoint cannot be written: {written.error}")

    def _average_statistics(self) -> None:
        # With model.batchnorm `batch` each rank has seen other micro-batches, and would evaluate
        # another network.
        for name, statistic in (
            self.network.named_buffers() if self.network.batchnorm == "batch" else ()
        ):
            if name.endswith(("running_mean", "running_var")):
                self.world.sum(statistic).div_(self.world.size)
