"""What the cost of a step is predicted from: the network, the training, and the machine.

All of it is plain numbers. `counting` gives what the network asks, `cards` what a machine should give, and
`calibration` what it was measured to give.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

FLOAT32 = 4  # bytes


class Line(NamedTuple):
    """Seconds or bytes: some once, and some for each of a number of things."""

    once: float
    each: float

    def at(self, count: float) -> float:
        """Of so many things."""
        return self.once + self.each * count

    def count_within(self, total: float) -> int:
        """How many things `total` is enough for."""
        return max(0, int((total - self.once) // self.each)) if self.each else 0


class Operation(NamedTuple):
    """One thing that PyTorch is asked to do with a micro-batch, by its number of images."""

    flops: Line
    moved: Line  # bytes of all tensors read and written
    is_convolution: bool


Pass = tuple[Operation, ...]  # of the network over a micro-batch


@dataclass(frozen=True)
class NetworkFacts:
    """What a network asks of any machine."""

    dimensions: int  # C
    parameters: int
    trained: int  # of them
    image_bytes: int  # pixels of an image, uint8
    forward: Pass
    backward: Pass
    graph: Line  # bytes that autograd keeps of a micro-batch
    working: Line  # bytes that the largest operation on a micro-batch reads and writes


@dataclass(frozen=True)
class Sharding:
    """What an engine divides among the ranks, and how often its ranks communicate.

    Args:
        weights, gradients, optimizer: whether each rank holds 1/W of them between steps.
        gathers: times that the weights are gathered for each replayed micro-batch, the share `unit` of them at once;
            0 gathers them once a step.
        reduces_often: whether gradients are reduced with each replayed micro-batch, and never whole on a rank.
        hides_reduction: whether gradients are reduced while the last backward pass goes on.
        unit: share of the weights that is there at once.
    """

    name: str = "ddp"
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    gathers: int = 0
    reduces_often: bool = False
    hides_reduction: bool = False
    unit: float = 0.25


@dataclass(frozen=True)
class Workload:
    """A training, as far as its costs go.

    Args:
        batch: B, images of a global batch.
        steps: of the training.
        replay_size: images of a micro-batch with a graph; None is as many as fit.
        describe_size: images of one without; None is as many as with.
        keep: micro-batches a rank that keep their graph; None is as many as fit.
        bins: M of a loss by histogram; None for a loss by rows of similarities.
        remembered: descriptors of a cross-batch memory.
        ranking_memory: bytes that ranking may keep bins of pairs in; None takes a quarter of the GPU.
        central: whether rank 0 ranks everything.
        gathers_early: whether descriptors are gathered while others are described.
        optimizer_states: float32 values a parameter.
        sharding: of the engine.
    """

    batch: int
    steps: int
    replay_size: int | None = 16
    describe_size: int | None = None
    keep: int | None = 0
    bins: int | None = 20
    remembered: int = 0
    ranking_memory: int | None = None
    central: bool = False
    gathers_early: bool = False
    optimizer_states: int = 2
    sharding: Sharding = Sharding()


class Link(NamedTuple):
    """Between two ranks, or two hosts."""

    bytes_per_second: float  # in one direction
    latency: float  # seconds of a message


class Duration(Protocol):
    """How long something takes."""

    def at(self, count: float) -> float:
        """Seconds, for so many things."""
        ...


@dataclass(frozen=True)
class Machine:
    """What a machine gives, for one network.

    Args:
        forward, forward_with_graph, backward: of a micro-batch, by images.
        rank: by pairs of images.
        parameter: seconds of an optimiser step a trained parameter.
        memory: bytes of a GPU that can be used.
        inside, between: links of a GPU to others of its host, and of a host to other hosts.
    """

    forward: Duration
    forward_with_graph: Duration
    backward: Duration
    rank: Duration
    parameter: float
    memory: float
    inside: Link
    between: Link
    gpus_a_host: int = 8
