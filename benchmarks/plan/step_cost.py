"""Predict what a training step costs on W ranks: memory, seconds, and bytes on the wire."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from typing import NamedTuple

from benchmarks.plan.network_cost import Line, NetworkCost
from distap.config.recipe import Recipe
from distap.ranking.gather import LEAST_SENT, MOST_CHUNKS
from distap.ranking.histogram.passes import HistogramLoss
from distap.ranking.loss import GPU_TILE_PAIRS, TENSORS_A_PAIR, Loss
from distap.ranking.losses.classes import ProxyLoss
from distap.ranking.losses.sums import WeightedSum
from distap.training.build import most_whole_classes
from distap.training.rank_memory import BF16, FLOAT32, NetworkSize, RankMemory


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


class Transfer(NamedTuple):
    """A collective that all ranks call together, on a ring."""

    name: str
    kind: str  # all_gather, all_reduce, reduce_scatter or scatter
    payload: float  # bytes that each rank puts in; for a scatter, bytes that each rank gets
    calls: int = 1  # in a step
    messages: int = 1  # of a call
    among: int | None = None  # ranks that take part, such as those of a host; None: all

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends; for a scatter, rank 0."""
        ranks = self.among or ranks
        rounds = {"all_gather": ranks, "scatter": ranks, "all_reduce": 2, "reduce_scatter": 1}[
            self.kind
        ]
        return self.calls * self.payload * rounds * (ranks - 1) / ranks

    def seconds(self, machine: Machine, ranks: int) -> float:
        """Duration, which the slowest link of the ring determines."""
        ranks = self.among or ranks
        links = (
            [machine.inside, machine.between] if ranks > machine.gpus_a_host else [machine.inside]
        )
        rounds = (2 if self.kind == "all_reduce" else 1) * ceil(log2(ranks))
        messages = self.calls * self.messages * rounds
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
    def held(self) -> RankMemory:
        network = self.network
        size = NetworkSize(
            network.parameters, network.trained, network.largest_block, network.frozen_bytes
        )
        return RankMemory(
            self.recipe.engine,
            size,
            self.ranks,
            self.machine.gpus_a_host,
            averages=self.recipe.ema is not None,
        )

    @cached_property
    def graph(self) -> Line:
        """Bytes that autograd keeps of a micro-batch."""
        line = self.network.graph
        if self.held.width != BF16:
            return line
        # Autocast's copies of float32 weights in bf16 are the gathered weights themselves.
        return Line(max(line.once - BF16 * self.network.parameters, 0.0), line.each)

    @property
    def gathers_per_pass(self) -> bool:
        """Return whether weights are gathered for a micro-batch, and not once a step."""
        return self.held.frees_blocks or getattr(self.recipe.engine, "stage", 0) == 3

    @property
    def share(self) -> int:  # images of a rank, b
        return ceil(self.batch / self.ranks)

    @cached_property
    def replay_size(self) -> int:  # images of a micro-batch with a graph
        return int(min(self.share, self.recipe.replay.size))

    @property
    def describe_size(self) -> int:  # images of a micro-batch without a graph
        return int(min(self.share, self.recipe.describe.size or self.recipe.replay.size))

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
        graph = self.graph
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
        room = int((self.machine.memory - beside) // self.graph(self.replay_size))
        return (
            0
            if self.gathers_per_pass or not self._reduces
            else max(0, min(ceil(self.share / self.replay_size), room))
        )

    @cached_property
    def _lasting(self) -> dict[str, float]:  # bytes that are there in all stages
        network = self.network
        images = 2 * self.share + self.batch + self.recipe.memory.size
        # proxies with their gradient and the optimiser's state
        proxies = FLOAT32 * (2 + self.held.states) * network.dimensions * self._classes
        return self.held.lasting | {
            "proxies": proxies / (self.ranks if self._shares_classes else 1),
            "descriptors": FLOAT32 * network.dimensions * images,
        }

    @property
    def _gathered(self) -> float:
        """Bytes of weights beyond the rank's own shard."""
        return self.held.gathered

    @property
    def _reduction(self) -> dict[str, float]:
        """Bytes that the reduction of the gradients needs for itself; no graph is left then."""
        return {"gathered weights": self._gathered, "message": self.held.message}

    @property
    def _reduces(self) -> bool:
        """Return whether there is memory for the reduction, whatever the size of a micro-batch."""
        return sum(self._lasting.values()) + sum(self._reduction.values()) <= self.machine.memory

    def _stages(self, kept_micro_batches: int) -> list[dict[str, float]]:
        """Bytes that describe, rank and replay need for themselves."""
        working = self.network.working
        graph = self.graph(self.replay_size)
        whole = {"gathered weights": self._gathered, "graphs": kept_micro_batches * graph}
        # Kept graphs are gone through first, so that a replayed one takes the room of one of them.
        replay = {"gathered weights": self._gathered, "graphs": max(kept_micro_batches, 1) * graph}
        return [
            {**whole, "working memory": working(self.describe_size)},
            {**whole, "ranking": self._ranking_bytes},
            {**replay, "working memory": working(self.replay_size)},
        ]

    @cached_property
    def _classes(self) -> int:
        """Classes with a proxy each, as far as the recipe says how many; 0 for other losses."""
        loss = self.recipe.loss
        return (loss.classes or 0) if isinstance(loss, ProxyLoss) else 0

    @property
    def _shares_classes(self) -> bool:
        most = most_whole_classes(self.recipe)
        return most is not None and self._classes > most

    @property
    def _ranked(self) -> tuple[int, int]:  # queries and gallery
        if self._classes:  # each rank scores the whole batch by its classes, twice
            return 2 * self.batch, ceil(self._classes / self.ranks)
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
        own_parameters = self.network.trained / self.held.ways_of_optimizer
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
        if self.held.ways_of_optimizer > 1:
            reduce = self._of_shards(trained)
        # Each image has a label, a number, and a flag that says whether it takes part.
        gather = [
            Transfer("descriptors", "all_gather", own_bytes),
            Transfer("labels", "all_gather", share * 3 * 8),
        ]
        return {"gather": gather, "rank": [rank], "reduce": reduce}

    def _of_shards(self, trained: float) -> list[Transfer]:
        """Messages that gather weights and sum gradients, which shards are parts of."""
        held = self.held
        network = self.network
        among = held.shares if held.shares > 1 else self.ranks
        passes = ceil(self.share / self.replay_size)
        describes = ceil(self.share / self.describe_size)
        # Weights are gathered for stage one, or after an update, and again for replay if they do
        # not stay: by ZeRO 3 for each micro-batch, by FSDP's passes for each forward and backward
        # pass.
        gathers = 1
        reductions = 1
        if held.frees_blocks:
            gathers = describes + 2 * passes
            reductions = passes
        elif self.gathers_per_pass:
            gathers += max(passes - self.kept, 0)
        messages = ceil(network.parameters / held.unit)
        weights = held.width * network.parameters / among
        transfers = [
            Transfer("weights", "all_gather", weights, gathers, messages, among),
            Transfer("gradients", "reduce_scatter", trained, reductions, messages, among),
        ]
        if among < self.ranks:
            hosts = ceil(self.ranks / among)
            between = Transfer("sums of hosts", "all_reduce", trained / among, 1, messages, hosts)
            transfers.append(between)
        return transfers

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
