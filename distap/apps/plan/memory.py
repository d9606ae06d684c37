"""What the memory of a GPU holds in a step, and the micro-batches that fit into it."""

from dataclasses import dataclass
from math import ceil

from distap.apps.plan.inputs import FLOAT32, Line, NetworkFacts, Workload
from distap.ranking.budget import GPU_TILE_PAIRS, TENSORS_A_PAIR


@dataclass(frozen=True)
class Memory:
    """Memory of the rank with the largest share.

    Args:
        facts: the network.
        workload: the training.
        available: bytes of a GPU.
        ranks: W.
    """

    facts: NetworkFacts
    workload: Workload
    available: float
    ranks: int

    @property
    def share(self) -> int:
        """b, images of a rank."""
        return ceil(self.workload.batch / self.ranks)

    @property
    def replay_size(self) -> int:
        """Images of a micro-batch with a graph."""
        wanted = self.workload.replay_size
        return min(self.share, max(1, self.greatest_replay_size) if wanted is None else wanted)

    @property
    def describe_size(self) -> int:
        """Images of a micro-batch without a graph."""
        return min(self.share, self.workload.describe_size or self.replay_size)

    @property
    def kept(self) -> int:
        """Micro-batches that keep their graph."""
        wanted = self.workload.keep
        return min(ceil(self.share / self.replay_size), self.greatest_keep if wanted is None else wanted)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of a GPU by what they hold, in the stage that needs most."""
        largest: dict[str, float] = max(self._stages(self.kept), key=lambda stage: sum(stage.values()))
        return {name: size for name, size in {**self.lasting, **largest}.items() if size}

    @property
    def fits(self) -> bool:
        """Whether there is so much."""
        return sum(self.parts.values()) <= self.available

    @property
    def host(self) -> float:
        """Bytes of a rank's pixels, which wait for replay in the memory of its host."""
        return float(self.share * self.facts.image_bytes)

    @property
    def greatest_replay_size(self) -> int:
        """Images of a micro-batch with a graph that fit, of this rank's share; 0 where not even one does."""
        graph, working = self.facts.graph, self.facts.working
        both = Line(graph.once + working.once, graph.each + working.each)
        beside = sum(self.lasting.values()) + self._whole_in_replay
        return min(self.share, both.count_within(self.available - beside))

    @property
    def greatest_keep(self) -> int:
        """Micro-batches whose graphs fit beside what each stage needs."""
        if self.workload.sharding.gathers:
            return 0
        beside = max(sum(stage.values()) for stage in self._stages(kept=0))
        room = self.available - sum(self.lasting.values()) - beside
        return min(ceil(self.share / self.replay_size), max(0, int(room // self.facts.graph.at(self.replay_size))))

    @property
    def lasting(self) -> dict[str, float]:
        """What is there in all three stages."""
        sharding, facts = self.workload.sharding, self.facts
        shard = 1 / self.ranks
        # Gradients are summed whole over the micro-batches, unless each is reduced at once.
        summed = 0 if sharding.reduces_often else 1
        return {
            "weights": FLOAT32 * facts.parameters * (shard if sharding.weights else 1),
            "gradients": FLOAT32 * facts.trained * (shard + summed if sharding.gradients else 1),
            "optimizer": FLOAT32
            * facts.trained
            * self.workload.optimizer_states
            * (shard if sharding.optimizer else 1),
            "descriptors": FLOAT32 * facts.dimensions * (2 * self.share + self._gallery),
        }

    @property
    def _whole(self) -> float:
        """Weights beside a rank's own share of them."""
        return FLOAT32 * self.facts.parameters if self.workload.sharding.weights and self.ranks > 1 else 0.0

    @property
    def _whole_in_replay(self) -> float:
        sharding = self.workload.sharding
        return self._whole * (sharding.unit if sharding.gathers else 1)

    @property
    def _gallery(self) -> int:
        return self.workload.batch + self.workload.remembered

    def _stages(self, kept: int) -> list[dict[str, float]]:
        working, whole = self.facts.working, self._whole
        # Kept graphs are gone through first, so a graph of replay takes the room of one of them.
        graph = self.facts.graph.at(self.replay_size)
        graphs = kept * graph
        return [
            {"gathered weights": whole, "graphs": graphs, "working memory": working.at(self.describe_size)},
            {"gathered weights": whole, "graphs": graphs, "ranking": self._ranking},
            {
                "gathered weights": self._whole_in_replay,
                "graphs": max(graphs, graph),
                "working memory": working.at(self.replay_size),
            },
        ]

    @property
    def _ranking(self) -> float:
        """Descriptors in another order, tables, and a byte for each pair where there is room."""
        workload = self.workload
        queries = workload.batch if workload.central else self.share
        pairs = queries * self._gallery
        budget = self.available / 4 if workload.ranking_memory is None else workload.ranking_memory
        in_order = FLOAT32 * self.facts.dimensions * (self._gallery + queries)
        # Counts are float64, slopes of all images float32; for negatives and for positives.
        tables = 2 * (workload.bins or 0) * (2 * 2 * FLOAT32 * queries + 2 * FLOAT32 * self._gallery)
        tiles = min(FLOAT32 * TENSORS_A_PAIR * min(pairs, GPU_TILE_PAIRS), budget / 2)
        bins_of_pairs = pairs if workload.bins is not None and pairs <= budget / 2 else 0
        return in_order + tables + tiles + bins_of_pairs
