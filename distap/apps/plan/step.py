"""What a training step costs, for any number of GPUs: seconds, bytes on the wire and memory.

Formulas of numbers: no tensor, device or clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from distap.apps.plan.inputs import Machine, NetworkFacts, Workload
from distap.apps.plan.memory import Memory
from distap.apps.plan.wire import Collective, gathering, ranking, reducing
from distap.ranking.gathering import LEAST_SENT, MOST_CHUNKS


@dataclass(frozen=True)
class MicroBatches:
    """Images of each micro-batch of a rank."""

    described: tuple[int, ...]  # without a graph, to be replayed
    kept: tuple[int, ...]  # described with a graph, which needs a backward pass only
    replayed: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A step on `ranks` GPUs, as the rank with the largest share sees it."""

    facts: NetworkFacts
    workload: Workload
    machine: Machine
    ranks: int

    @cached_property
    def memory(self) -> Memory:
        """What a GPU holds."""
        return Memory(self.facts, self.workload, self.machine.memory, self.ranks)

    @cached_property
    def micro_batches(self) -> MicroBatches:
        """How its share is cut: the last micro-batches keep their graph."""
        b, size = self.memory.share, self.memory.replay_size
        first_kept = max(-(-b // size) - self.memory.kept, 0) * size
        return MicroBatches(
            tuple(_cuts(first_kept, self.memory.describe_size)),
            tuple(_cuts(b - first_kept, size)),
            tuple(_cuts(first_kept, size)),
        )

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By stage; what only waits for other ranks is `gather` and `reduce`."""
        machine, sharding, cuts = self.machine, self.workload.sharding, self.micro_batches
        with_graph = machine.forward_with_graph
        describe = sum(map(machine.forward.at, cuts.described)) + sum(map(with_graph.at, cuts.kept))
        waits = {
            stage: sum(collective.seconds(machine, self.ranks) for collective in collectives)
            for stage, collectives in self.collectives.items()
        }
        if self.workload.gathers_early:
            # The last chunk is sent when there is nothing left to describe.
            last = waits["gather"] / chunks_of(self.memory.share)
            waits["gather"] = max(last, waits["gather"] - describe)
        if sharding.hides_reduction:
            waits["reduce"] = max(0.0, waits["reduce"] - machine.backward.at((cuts.replayed or cuts.kept)[-1]))
        own_parameters = self.facts.trained / (self.ranks if sharding.optimizer else 1)
        return {
            "describe": describe,
            "gather": waits["gather"],
            "rank": machine.rank.at(self.pairs) + waits["rank"],
            "replay": sum(map(with_graph.at, cuts.replayed))
            + sum(map(machine.backward.at, cuts.replayed + cuts.kept)),
            "reduce": waits["reduce"],
            "optimizer": machine.parameter * own_parameters,
        }

    @property
    def pairs(self) -> float:
        """Pairs of images that this rank ranks: those of its own images are computed once for both."""
        workload = self.workload
        queries = workload.batch if workload.central else self.memory.share
        return pairs_of(queries, workload.batch + workload.remembered, workload.bins is not None)

    @cached_property
    def collectives(self) -> dict[str, list[Collective]]:
        """What ranks send each other, by stage."""
        if self.ranks == 1:
            return {"gather": [], "rank": [], "reduce": []}
        facts, workload, share, cuts = self.facts, self.workload, self.memory.share, self.micro_batches
        return {
            "gather": gathering(facts, share),
            "rank": ranking(facts, workload, share, self.ranks),
            "reduce": reducing(facts, workload.sharding, self.ranks, len(cuts.replayed)),
        }

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by what they are."""
        return {
            collective.name: collective.sent(self.ranks)
            for collectives in self.collectives.values()
            for collective in collectives
        }

    @property
    def total_seconds(self) -> float:
        """Of a step."""
        return sum(self.seconds.values())

    @property
    def communication_share(self) -> float:
        """Share of a step that waits for descriptors or for gradients."""
        return (self.seconds["gather"] + self.seconds["reduce"]) / self.total_seconds

    @property
    def images_per_second(self) -> float:
        """Of all ranks."""
        return self.workload.batch / self.total_seconds

    @property
    def efficiency(self) -> float:
        """Images a second and GPU, relative to one GPU."""
        alone = Step(self.facts, self.workload, self.machine, 1)
        return alone.total_seconds / (self.ranks * self.total_seconds)

    @property
    def days(self) -> float:
        """Of all steps."""
        return self.workload.steps * self.total_seconds / 86_400


def pairs_of(queries: int, gallery: int, by_histogram: bool) -> float:
    """Pairs to rank, each of two own images once where the loss allows, which is half of the work for it."""
    pairs = queries * gallery
    return pairs - queries**2 / 4 if by_histogram else pairs


def chunks_of(share: int) -> int:
    """In how many messages descriptors are gathered while others are described."""
    return -(-share // max(LEAST_SENT, -(-share // MOST_CHUNKS)))


def _cuts(images: int, size: int) -> Iterator[int]:
    for start in range(0, images, size):
        yield min(size, images - start)
