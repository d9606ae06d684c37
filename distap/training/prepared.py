"""Prepare a training: open its data once, then build its network, its step and its state."""

import time
from dataclasses import dataclass, replace
from functools import partial

from distap.checkpoint.agreement import first_on_rank_0, on_rank_0
from distap.config.recipe import Recipe
from distap.data.loading.share import TrainingImages
from distap.evaluation.describing import describing_of_set
from distap.evaluation.evaluation_set import EvaluationSet
from distap.model.network import RetrievalNetwork
from distap.model.weights import RandomWeights
from distap.stopwatch import Stopwatch
from distap.telemetry.endpoint import Endpoint
from distap.training.build import images_of, learner_of, loss_of, step_of
from distap.training.learner import TrainingStep
from distap.training.projection import described_once, whiten_projection, why_inputs_vary
from distap.training.run_report import RunReport
from distap.training.run_state import RunState, is_begun, require_same
from distap.training.schedule import Length
from distap.training.start_checks import (
    check_sets,
    checked_network,
    join_rows,
    open_data,
    open_rows,
)
from distap.world import World


@dataclass(frozen=True)
class Prepared:
    """All parts of a training before its first step, on one rank."""

    recipe: Recipe  # that trains: on descriptors, if the images were described once for all steps
    report: RunReport  # of the recipe as it was given
    images: TrainingImages
    sets: dict[str, EvaluationSet]  # to evaluate on, by name
    length: Length
    network: RetrievalNetwork
    step: TrainingStep  # with the learner
    state: RunState
    is_begun: bool  # whether the run has a checkpoint to resume from
    started: float  # time.perf_counter() when the preparation began


def prepare(
    recipe: Recipe,
    world: World,
    endpoint: Endpoint | None = None,
    planned_ranks: int | None = None,
) -> Prepared:
    """Check a recipe, its data and its network, and build all parts of the training.

    Every rank calls this, since the ranks agree on what they see.

    Args:
        endpoint: answers HTTP requests about this rank; a new one answers nothing until it is
            served.
        planned_ranks: of a dry run on one rank, the number of ranks that would train. It describes
            no images, so the projection stays random.
    Raises:
        DistapError: some part cannot work, on all ranks.
    """
    started = time.perf_counter()
    is_dry = planned_ranks is not None
    endpoint = endpoint or Endpoint(world.rank)
    endpoint.watchdog = world.watchdog
    require_same(recipe, world)
    # The report comes first, so that metrics show a start that takes long or fails again and again.
    report = RunReport(recipe, world, recipe.sampling.size, endpoint)
    stopwatch = Stopwatch(world.device)

    # Rank 0 alone finds and reports a person's mistakes in the data, once.
    readers = replace(world, size=planned_ranks or world.size)
    images, sets = first_on_rank_0(world, partial(open_data, recipe, readers, stopwatch))
    world.agreed(None, [images.fingerprint[:12]], None, f"data in {recipe.data.train_name}")
    rows = open_rows(recipe, world)
    first_on_rank_0(world, partial(join_rows, images, rows))
    length = first_on_rank_0(world, partial(Length, recipe, images.index, images.size))
    on_rank_0(world, partial(check_sets, recipe, images, length.steps))
    report.plan(length)

    # Network and evaluations come before an engine takes the parameters apart. A checkpoint
    # replaces the weights that the run began with, which need not exist any more.
    resumes = is_begun(recipe, world)
    network = checked_network(recipe, world, images, RandomWeights() if resumes else None)
    if not is_dry and why_inputs_vary(recipe, network, images) is None:
        recipe = described_once(recipe, images, world, resumes)
        images = images_of(recipe, world, stopwatch)
        join_rows(images, rows)
    if not resumes:
        whiten_projection(recipe, network, images, world, only_check=is_dry)
    network.train()

    def try_sets() -> None:
        for name, opened in sets.items():  # raises for what the network does not take
            describing = describing_of_set(recipe, name, network, world)
            opened.joined_rows.require_dimensions(describing.describer.dimensions)

    on_rank_0(world, try_sets)  # which has the values of the network already

    learner = learner_of(recipe, network, world)
    step = step_of(recipe, learner, loss_of(recipe, images, network, world), world, stopwatch)
    report.metrics.replay_drift_limit.set(step.stages.max_drift)
    return Prepared(
        recipe=recipe,
        report=report,
        images=images,
        sets=sets,
        length=length,
        network=network,
        step=step,
        state=RunState(recipe, world, images, step, rows.fingerprints if rows else {}),
        is_begun=resumes,
        started=started,
    )
