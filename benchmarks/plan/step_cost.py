"""Predict what a training step costs on W ranks: memory, seconds, and bytes on the wire."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from typing import Any, NamedTuple

from benchmarks.plan.network_cost import NetworkCost
from distap.config.recipe import Recipe
from distap.ranking.gather import LEAST_SENT, MOST_CHUNKS
from distap.ranking.histogram.passes import HistogramLoss
from distap.ranking.loss import GPU_TILE_PAIRS, TENSORS_A_PAIR, Loss
from distap.ranking.losses.sums import WeightedSum
from distap.registry import name_of
from distap.training.engines import GREATEST_BUCKET

FLOAT32 = 4  # bytes


class NetworkLink(NamedTuple):
    bytes_per_second: float  # in each direction
    latency: float  # seconds of a message


class Machine(NamedTuple):
    """Speed and memory of a kind of machine, for one network."""

    forward: Callable[[float], float]  # seconds of a micro-batch of so many images
    forward_with_graph: Callable[[float], float]
    backward: Callable[[float], float]
    rank: Callable[[float], float]  # seconds of ranking so many pairs of images
    parameter: float  # seconds of an optimiser step per trained parameter
    memory: float  # usable bytes of a GPU
    inside: NetworkLink  # of a GPU to the others of its host
    between: NetworkLink  # of a host to other hosts
    gpus_a_host: int = 8


class Sharding(NamedTuple):
    """How an engine divides its state among the ranks, and how often its ranks communicate."""

    weights: bool = False  # each rank holds 1/W of the weights between steps
    # each rank holds 1/W of the summed gradients and of the optimiser's state
    optimizer: bool = False
    # times that weights are gathered for a replayed micro-batch; 0 gathers them once a step
    gathers: int = 0
    states: int = 2  # float32 values per parameter that the optimiser keeps, such as Adam's moments
    longest_message: float = math.inf  # trained parameters whose gradients one message holds
    keeps_message: bool = False  # whether the buffer of a message stays between steps

    @classmethod
    def of(cls, engine: Any) -> "Sharding":
        name = name_of("engine", engine)
        if name == "fsdp":
            return cls(True, True)
        if name == "deepspeed":
            # Gradients are reduced once, in every stage. Weights of stage 3 stay from the forward
            # to the backward pass, up to DeepSpeed's limit of a thousand millions. It updates its
            # own copy of the parameters.
            is_last = engine.stage == 3
            return cls(
                is_last,
                True,
                int(is_last),
                states=3,
                longest_message=GREATEST_BUCKET,
                keeps_message=is_last,
            )
        return cls()


class Transfer(NamedTuple):
    """A collective that all ranks call together, on a ring."""

    name: str
    kind: str  # all_gather, all_reduce, reduce_scatter or scatter
    payload: float  # bytes that each rank puts in; for a scatter, bytes that each rank gets
    calls: int = 1  # in a step

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends; for a scatter, rank 0."""
        rounds = {"all_gather": ranks, "scatter": ranks, "all_reduce": 2, "reduce_scatter": 1}[
            self.kind
        ]
        return self.calls * self.payload * rounds * (ranks - 1) / ranks

    def seconds(self, machine: Machine, ranks: int) -> float:
        """Duration, which the slowest link of the ring determines."""
        links = (
            [machine.inside, machine.between] if ranks > machine.gpus_a_host else [machine.inside]
        )
        messages = self.calls * (2 if self.kind == "all_reduce" else 1) * ceil(log2(ranks))
        slowest = min(link.bytes_per_second for link in links)
        return self.sent(ranks) / slowest + messages * max(link.latency for link in links)


@dataclass(frozen=True)
class StepCost:
    """Cost of a recipe's step on `ranks` GPUs, for the rank with the largest share of the batch,
    B."""

    recipe: Recipe
    batch: int
    network: NetworkCost
    machine: Machine
    ranks: int

    @cached_property
    def sharding(self) -> Sharding:
        return Sharding.of(self.recipe.engine)

    @property
    def share(self) -> int:  # images of a rank, b
        return ceil(self.batch / self.ranks)

    @cached_property
    def replay_size(self) -> int:  # images of a micro-batch with a graph
        return int(min(self.share, self.recipe.replay.size))

    @property
    def describe_size(self) -> int:  # images of a micro-batch without a graph
        return self.replay_size

    @cached_property
    def kept(self) -> int:  # micro-batches that keep their graph; `auto` takes as many as fit
        wanted = self.recipe.keep
        return min(
            ceil(self.share / self.replay_size),
            wanted if isinstance(wanted, int) else self.greatest_keep,
        )

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of a GPU by content, in the stage that needs most."""
        stages = [*self._stages(self.kept), self._reduction]
        largest = max(stages, key=lambda stage: sum(stage.values()))
        return {name: size for name, size in {**self._lasting, **largest}.items() if size}

    @property
    # most images of a micro-batch with a graph that fit; 0 if not one does
    def greatest_replay_size(self) -> int:
        graph = self.network.graph
        working = self.network.working
        beside = sum(self._lasting.values()) + self._gathered + graph.once + working.once
        if not self._reduces:
            return 0
        return max(
            0, min(self.share, int((self.machine.memory - beside) // (graph.each + working.each)))
        )

    @property
    # most micro-batches whose graphs fit beside the needs of each stage
    def greatest_keep(self) -> int:
        beside = sum(self._lasting.values()) + max(
            sum(stage.values()) for stage in self._stages(kept_micro_batches=0)
        )
        room = int((self.machine.memory - beside) // self.network.graph(self.replay_size))
        return (
            0
            if self.sharding.gathers or not self._reduces
            else max(0, min(ceil(self.share / self.replay_size), room))
        )

    @cached_property
    def _lasting(self) -> dict[str, float]:  # bytes that are there in all stages
        sharding = self.sharding
        network = self.network
        optimizer_share = 1 / self.ranks
        images = 2 * self.share + self.batch + self.recipe.memory.size
        return {
            "weights": FLOAT32 * network.parameters * (optimizer_share if sharding.weights else 1),
            "gradients": FLOAT32 * network.trained,  # summed whole over the micro-batches
            "buffer of messages": self._message if sharding.keeps_message else 0,
            "optimizer": (
                FLOAT32
                * network.trained
                * sharding.states
                * (optimizer_share if sharding.optimizer else 1)
            ),
            "average": (
                0
                if self.recipe.ema is None
                else FLOAT32 * network.trained * (optimizer_share if sharding.weights else 1)
            ),
            "descriptors": FLOAT32 * network.dimensions * images,
        }

    @property
    def _gathered(self) -> float:
        """Bytes of weights beyond the rank's own shard."""
        return (
            FLOAT32 * self.network.parameters if self.sharding.weights and self.ranks > 1 else 0.0
        )

    @property
    def _message(self) -> float:
        """Bytes of the message that sums gradients over ranks, a copy of them.

        All in one, if it is not too long.
        """
        longest = min(self.network.trained, self.sharding.longest_message)
        return FLOAT32 * longest if self.ranks > 1 else 0.0

    @property
    def _reduction(self) -> dict[str, float]:
        """Bytes that the reduction of the gradients needs for itself; no graph is left then."""
        return {"gathered weights": self._gathered, "message": self._message}

    @property
    def _reduces(self) -> bool:
        """Return whether there is memory for the reduction, whatever the size of a micro-batch."""
        return sum(self._lasting.values()) + sum(self._reduction.values()) <= self.machine.memory

    def _stages(self, kept_micro_batches: int) -> list[dict[str, float]]:
        """Bytes that describe, rank and replay need for themselves."""
        working = self.network.working
        graph = self.network.graph(self.replay_size)
        whole = {"gathered weights": self._gathered, "graphs": kept_micro_batches * graph}
        # Kept graphs are gone through first, so that a replayed one takes the room of one of them.
        replay = {"gathered weights": self._gathered, "graphs": max(kept_micro_batches, 1) * graph}
        return [
            {**whole, "working memory": working(self.describe_size)},
            {**whole, "ranking": self._ranking_bytes},
            {**replay, "working memory": working(self.replay_size)},
        ]

    @property
    def _ranked(self) -> tuple[int, int]:  # queries and gallery
        rows = self.batch if self.recipe.rank.mode == "central" else self.share
        return rows, self.batch + self.recipe.memory.size

    @property
    def _ranking_bytes(self) -> float:
        # Descriptors in another order, tables, tiles, and a byte for each pair if there is room.
        queries, gallery = self._ranked
        pairs = queries * gallery
        bins = bins_of(self.recipe.loss) or 0
        half = self.machine.memory / 8
        in_order = FLOAT32 * self.network.dimensions * (gallery + queries)
        tables = 2 * bins * FLOAT32 * (4 * queries + 2 * gallery)  # of negatives and of positives
        tiles = min(FLOAT32 * TENSORS_A_PAIR * min(pairs, GPU_TILE_PAIRS), half)
        return in_order + tables + tiles + (pairs if bins and pairs <= half else 0)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage; `gather` and `reduce` are the seconds that a rank waits for others."""
        machine = self.machine
        with_graph = self.machine.forward_with_graph
        # The last micro-batches keep their graph from stage one.
        first_kept = max(ceil(self.share / self.replay_size) - self.kept, 0) * self.replay_size
        replayed = _micro_batches(first_kept, self.replay_size)
        kept_micro_batches = _micro_batches(self.share - first_kept, self.replay_size)
        describe = sum(map(machine.forward, _micro_batches(first_kept, self.describe_size)))
        describe += sum(map(with_graph, kept_micro_batches))
        wait = {
            stage: sum(transfer.seconds(machine, self.ranks) for transfer in transfers)
            for stage, transfers in self.transfers.items()
        }
        # Only the last chunk is sent when nothing is left to describe.
        chunks = ceil(self.share / max(LEAST_SENT, ceil(self.share / MOST_CHUNKS)))
        wait["gather"] = max(wait["gather"] / chunks, wait["gather"] - describe)
        own_parameters = self.network.trained / (self.ranks if self.sharding.optimizer else 1)
        return {
            "describe": describe,
            "gather": wait["gather"],
            "rank": machine.rank(pairs_of(*self._ranked, self.recipe.loss)) + wait["rank"],
            "replay": sum(map(with_graph, replayed))
            + sum(map(machine.backward, replayed + kept_micro_batches)),
            "reduce": wait["reduce"],
            "optimizer": machine.parameter * own_parameters,
        }

    @cached_property
    def transfers(self) -> dict[str, list[Transfer]]:
        """Data that ranks send each other, by stage; one rank sends nothing of it."""
        network = self.network
        sharding = self.sharding
        share = self.share
        bins = bins_of(self.recipe.loss)
        own_bytes = share * network.dimensions * FLOAT32
        trained = network.trained * FLOAT32
        if self.recipe.rank.mode == "central":
            rank = Transfer("gradients of descriptors", "scatter", own_bytes)
        elif bins is None:
            rank = Transfer("gradients of descriptors", "reduce_scatter", own_bytes * self.ranks)
        else:
            rank = Transfer("slope tables", "all_gather", share * 2 * (bins - 1) * FLOAT32)
        reduce = [Transfer("gradients", "all_reduce", trained)]
        if sharding.optimizer:
            # Weights are gathered for stage one, or after an update, and again for replay if they
            # do not stay.
            replayed = max(ceil(share / self.replay_size) - self.kept, 0)
            gathers = 1 + sharding.gathers * replayed
            weights = Transfer(
                "weights", "all_gather", network.parameters * FLOAT32 / self.ranks, gathers
            )
            reduce = [weights, Transfer("gradients", "reduce_scatter", trained)]
        # Each image has a label, a number, and a flag that says whether it takes part.
        gather = [
            Transfer("descriptors", "all_gather", own_bytes),
            Transfer("labels", "all_gather", share * 3 * 8),
        ]
        return {"gather": gather, "rank": [rank], "reduce": reduce}

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by content."""
        transfers = [
            transfer for stage in self.transfers.values() for transfer in stage if self.ranks > 1
        ]
        return {transfer.name: transfer.sent(self.ranks) for transfer in transfers}


def bins_of(loss: Loss) -> int | None:
    """Return the bins of a histogram loss or of a sum of them.

    None if a loss needs whole rows of similarities.
    """
    terms = [term for _, term in loss.terms] if isinstance(loss, WeightedSum) else [loss]
    bins = [term.centres for term in terms if isinstance(term, HistogramLoss)]
    return sum(bins) if len(bins) == len(terms) else None


def pairs_of(queries: int, gallery: int, loss: Loss) -> float:
    """Pairs to rank.

    A histogram loss counts a pair of two own images once, which is half of its work.
    """
    pairs = queries * gallery
    return pairs if bins_of(loss) is None else pairs - queries**2 / 4


def _micro_batches(images: int, size: int) -> list[int]:
    return [min(size, images - start) for start in range(0, images, size)]
