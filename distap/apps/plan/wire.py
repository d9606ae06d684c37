"""What the ranks of a step send each other, and how long that takes."""

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from distap.apps.plan.inputs import FLOAT32, Machine, NetworkFacts, Sharding, Workload

Kind = Literal["all_gather", "all_reduce", "reduce_scatter", "scatter"]


@dataclass(frozen=True)
class Collective:
    """Something that all ranks do together in a step, `calls` times.

    Args:
        name: what is sent.
        kind: of the collective.
        payload: bytes that each rank puts in; for a scatter, that each gets out.
        calls: times a step.
    """

    name: str
    kind: Kind
    payload: float
    calls: int = 1

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends on a ring."""
        others = ranks - 1
        factor: dict[Kind, float] = {
            "all_gather": others,
            "all_reduce": 2 * others / ranks,
            "reduce_scatter": others / ranks,
            "scatter": others,  # of rank 0
        }
        return self.calls * self.payload * factor[self.kind]

    def seconds(self, machine: Machine, ranks: int) -> float:
        """How long it takes: the slowest link of the ring sets the pace."""
        if ranks == 1:
            return 0.0
        links = [machine.inside, machine.between] if ranks > machine.gpus_a_host else [machine.inside]
        slowest = min(link.bytes_per_second for link in links)
        latency = max(link.latency for link in links)
        rounds = (2 if self.kind == "all_reduce" else 1) * ceil(log2(ranks))
        return self.sent(ranks) / slowest + self.calls * rounds * latency


def gathering(facts: NetworkFacts, share: int) -> list[Collective]:
    """Before ranking: every rank gets every descriptor, and with it label, number and whether it takes part."""
    return [
        Collective("descriptors", "all_gather", share * facts.dimensions * FLOAT32),
        Collective("labels", "all_gather", share * 3 * 8),
    ]


def ranking(facts: NetworkFacts, workload: Workload, share: int, ranks: int) -> list[Collective]:
    """While ranking."""
    own = share * facts.dimensions * FLOAT32
    if workload.central:
        return [Collective("gradients of descriptors", "scatter", own)]
    if workload.bins is None:
        return [Collective("gradients of descriptors", "reduce_scatter", own * ranks)]
    return [Collective("slope tables", "all_gather", share * 2 * (workload.bins - 1) * FLOAT32)]


def reducing(facts: NetworkFacts, sharding: Sharding, ranks: int, replayed: int) -> list[Collective]:
    """For the parameters; `replayed` is the number of micro-batches of stage three that have no graph yet."""
    trained = facts.trained * FLOAT32
    if not sharding.optimizer:
        return [Collective("gradients", "all_reduce", trained)]
    # For stage one, or after an update; and again where they do not stay.
    gathers = 1 + sharding.gathers * replayed
    return [
        Collective("weights", "all_gather", facts.parameters * FLOAT32 / ranks, gathers),
        Collective("gradients", "reduce_scatter", trained, max(1, replayed) if sharding.reduces_often else 1),
    ]
