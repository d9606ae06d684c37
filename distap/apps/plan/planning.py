"""From a recipe to its plan: by a card's data sheet, or by a measurement of this machine."""

from dataclasses import replace

from distap.apps.plan.calibration import IMAGES_A_CLASS, Bench
from distap.apps.plan.cards import LINK_SHARE, MESSAGE_SECONDS, assumptions, card_of, machine_of
from distap.apps.plan.inputs import Link, Machine, NetworkFacts, Workload
from distap.apps.plan.memory import Memory
from distap.apps.plan.plan import Check, Plan, bytes_per_second, common_assumptions, numbers_of_gpus
from distap.apps.plan.recipes import facts_of, workload_of
from distap.apps.plan.step import Step
from distap.config.recipe import Recipe
from distap.stages.sizes import ENOUGH_FASTER
from distap.world import World, joined_world

CHECKED_MICRO_BATCHES = 4  # of a rank, in the steps that are measured beside their prediction
CHECKED_STEPS = 3


def from_card(
    recipe: Recipe, gpus: str, batch: int | None, link: str, gpus_a_host: int | None, card_name: str
) -> Plan:
    """A plan by a data sheet.

    Args:
        recipe: the training.
        gpus: numbers of GPUs, with commas between them.
        batch: B; None takes the recipe's.
        link: rate of a host's network.
        gpus_a_host: None takes the card's.
        card_name: of the card.
    """
    card, network_bytes = card_of(card_name), bytes_per_second(link)
    workload = _workload(recipe, batch)
    numbers = numbers_of_gpus(gpus, workload.batch)
    facts = facts_of(recipe)
    machine = machine_of(card, facts, workload, recipe.precision, network_bytes)
    machine = replace(machine, gpus_a_host=gpus_a_host or card.gpus)
    if workload.replay_size is None:
        fits = Memory(facts, workload, machine.memory, numbers[0]).greatest_replay_size
        workload = replace(workload, replay_size=_fast_enough(machine, fits))
    lines = [
        *assumptions(card_name, card),
        f"hosts of {machine.gpus_a_host} GPUs, {8 * network_bytes / 1e9:,.0f} Gb/s between them",
    ]
    return _plan(recipe, facts, workload, machine, numbers, lines)


def from_measurement(
    recipe: Recipe, gpus: str, batch: int | None, link: str, gpus_a_host: int | None, rounds: int
) -> Plan | None:
    """A plan by what this machine was measured to give; None on all ranks but the first.

    Args:
        recipe, gpus, batch, link, gpus_a_host: as above; the link that ranks were started across is measured.
        rounds: times that each thing is measured.
    """
    workload = _workload(recipe, batch)
    numbers = numbers_of_gpus(gpus, workload.batch)
    between = Link(LINK_SHARE * bytes_per_second(link), MESSAGE_SECONDS["between"])
    facts = facts_of(recipe)
    with joined_world(recipe.timeout_seconds) as world:
        bench = Bench.of(recipe, workload, facts, world)
        machine = bench.machine(rounds, between, gpus_a_host or 8)
        checks = _checks(bench, machine)
        if world.rank:
            return None
        return _plan(recipe, facts, bench.workload, machine, numbers, _measured(machine, world, rounds), checks)


def _fast_enough(machine: Machine, fits: int) -> int:
    """Images of a micro-batch, doubled as long as that pays and fits, as training does it."""
    size = 1
    while 2 * size <= fits:
        seconds, doubled = (machine.forward_with_graph.at(n) + machine.backward.at(n) for n in (size, 2 * size))
        if 2 * seconds < ENOUGH_FASTER * doubled:
            break
        size *= 2
    return size


def _workload(recipe: Recipe, batch: int | None) -> Workload:
    workload = workload_of(recipe)
    return workload if batch is None else replace(workload, batch=batch)


def _plan(
    recipe: Recipe,
    facts: NetworkFacts,
    workload: Workload,
    machine: Machine,
    numbers: list[int],
    lines: list[str],
    checks: list[Check] | None = None,
) -> Plan:
    steps = [Step(facts, workload, machine, ranks) for ranks in numbers]
    network = (
        f"{recipe.model.backbone} at {recipe.data.image_size} px in {recipe.precision}, B = {workload.batch:,}, "
        f"{workload.steps:,} steps, engine {workload.sharding.name}"
    )
    return Plan(network, steps, [*lines, *common_assumptions(workload, facts), *_not_in_it(recipe)], checks or [])


def _not_in_it(recipe: Recipe) -> list[str]:
    """What the recipe asks for that the figures do not know of."""
    savings = {
        "describe.precision": recipe.describe.precision not in (None, recipe.precision),
        "describe.fold_batchnorm": recipe.describe.fold_batchnorm,
        "step.compile": recipe.step.compile,
        "replay.skip_below": recipe.replay.skip_below > 0,
    }
    asked = [key for key, is_asked in savings.items() if is_asked]
    return [f"what {' and '.join(asked)} saves is not in the prediction by a data sheet"] if asked else []


def _checks(bench: Bench, machine: Machine) -> list[Check]:
    """Real steps of other batches than were measured, without and with graphs kept."""
    # Two classes at least, or there is nothing to rank.
    batch = max(bench.world.size * bench.size * CHECKED_MICRO_BATCHES, 2 * IMAGES_A_CLASS)
    kept = [0, CHECKED_MICRO_BATCHES // 2] if bench.engine.keeps_graphs else [0]
    checks = []
    for keep in kept:
        measured = bench.steps(batch, CHECKED_STEPS, keep).slowest
        workload = replace(
            bench.workload, batch=batch, replay_size=bench.workload.replay_size or bench.size, keep=keep
        )
        predicted = Step(bench.facts, workload, machine, bench.world.size).seconds
        what = f"a step here: {bench.world.size} ranks, B = {batch}, {keep} of {CHECKED_MICRO_BATCHES} graphs kept"
        checks.append(Check(what, measured, predicted))
    return checks


def _measured(machine: Machine, world: World, rounds: int) -> list[str]:
    across = "measured" if world.size > 1 else "not measured: start several ranks by torchrun to do so"
    return [
        f"this machine's {world.device.type}, the medians of {rounds} rounds on {world.size} ranks at once: other "
        "GPUs are taken to be like this one",
        f"memory of a rank: {machine.memory / 1e9:,.1f} GB, which are free here",
        f"a rank sends {machine.inside.bytes_per_second / 1e9:.3g} GB/s inside a host ({across}) and a host "
        f"{machine.between.bytes_per_second / 1e9:.3g} GB/s to another, with {machine.gpus_a_host} ranks on each",
    ]
