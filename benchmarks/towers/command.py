"""`python -m benchmarks towers`: memory of a rank by engine, and of a host that begins."""

from typing import Annotated, Any, ClassVar

from typer import Option

from benchmarks import harness
from benchmarks.measuring import peak_bytes
from benchmarks.towers.fake_rank import BLOCKS, WIDTH, peak_of_a_rank, recipe_of
from distap.telemetry.terminal import track
from distap.training.build import learner_of, network_of
from distap.training.rank_memory import NetworkSize, RankMemory
from distap.world import World

ENGINES: tuple[dict[str, Any], ...] = (
    {"name": "ddp"},
    {"name": "fsdp", "unit": "network"},
    {"name": "fsdp", "unit": "blocks"},
    {"name": "fsdp", "unit": "blocks", "gather": "bf16"},
    {"name": "fsdp", "unit": "blocks", "within": "host"},
    {"name": "fsdp", "reshard": "pass"},
    {"name": "fsdp", "reshard": "pass", "gather": "bf16"},
    {"name": "fsdp", "reshard": "pass", "within": "host"},
)
PEAKS = "engine={engine}|ranks={ranks}|measured={measured:.3f}|by formula={predicted:.3f}"
BUILDING = "engine={engine}|ranks={ranks}|all ranks={all_ranks:.2f}|rank 0={rank_0:.2f}"


class TowersBenchmark(harness.Benchmark):
    """Measure the memory of one of many ranks by engine, and of a host's ranks that begin.

    The peaks are those of 64 equal blocks with Adam, in bytes a parameter, by ranks whose messages
    a fake process group answers: buffers are real, activations next to nothing. Ranks on this host
    then build a network and share it out; that is in sizes of the network.
    """

    name: ClassVar[str] = "towers"
    ranks: Annotated[list[int], Option(help="Ranks of a fake group; repeat for several.")] = [
        8,
        64,
        512,
    ]
    trained: Annotated[int, Option(help="Blocks of the 64 that train, the last ones.", min=1)] = (
        BLOCKS
    )
    host_ranks: Annotated[int, Option(help="Ranks that build a network together.", min=1)] = 4
    backbone: harness.Backbone = "vit_large_patch16_224"
    engine: Annotated[str, Option(hidden=True)] = ""  # of a rank that builds

    def report(self) -> harness.Report:
        cases = [(engine, ranks) for engine in ENGINES for ranks in self.ranks]
        peaks = [self._peak(*case) for case in track(cases, "measuring", len(cases))]
        built = []
        for engine in ("ddp", "fsdp"):
            settings = self.model_copy(update={"engine": engine})
            built.append(harness.measure_on_ranks(settings, self.host_ranks, 1))
        tables = [
            harness.table_of(
                "peak of a rank, bytes a parameter", "hosts have 8 ranks", peaks, PEAKS
            ),
            harness.table_of(
                f"peak of a host that begins with {self.backbone}", "in networks", built, BUILDING
            ),
        ]
        return harness.Report({"peaks": peaks, "building": built}, tables)

    def _peak(self, engine: dict[str, Any], ranks: int) -> dict[str, Any]:
        numel = BLOCKS * WIDTH**2
        settings = recipe_of(engine).engine
        size = NetworkSize(numel, self.trained * WIDTH**2, WIDTH**2)
        return {
            "engine": ", ".join(f"{key}: {value}" for key, value in engine.items()),
            "ranks": ranks,
            "measured": peak_of_a_rank(engine, ranks, self.trained),
            "predicted": RankMemory(settings, size, ranks).peak / numel,
        }

    def on_rank(self, world: World) -> dict[str, Any]:
        recipe = recipe_of({"name": self.engine}, self.backbone)
        learners = []

        def begin() -> None:
            network = network_of(recipe, world, whole=self.engine == "ddp")
            learners.append(learner_of(recipe, network, world))

        rise = peak_bytes(begin, world.device)
        numel = sum(parameter.numel() for parameter in learners[0].network.parameters())
        rises = [rise / (4 * numel) for rise in world.gather_values(rise)]
        return {
            "engine": self.engine,
            "ranks": world.size,
            "all_ranks": sum(rises),
            "rank_0": rises[0],
        }
