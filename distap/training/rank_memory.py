"""Predict the memory that a rank needs for a network, its gradients and its optimiser.

benchmarks/towers measures the same, by real buffers of ranks whose messages are not sent.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from distap.errors import DistapError
from distap.stages.blocks import blocks_of, numel
from distap.stages.fsdp import goes_by_blocks
from distap.stages.replica import BUCKET_BYTES
from distap.training.engines import (
    GREATEST_BUCKET,
    DDPSettings,
    DeepSpeedSettings,
    FSDPSettings,
)
from distap.training.optimizer import GROUP_BYTES

FLOAT32 = 4  # bytes
BF16 = 2
# Bytes for each parameter of the largest block: with `reshard: pass` two gathered blocks, buffers
# of their messages, and a gradient; otherwise the message of a gradient. They were measured.
OF_PASSES = {FLOAT32: 20, BF16: 11}
OF_MESSAGES = 6
# Ways to share a network out, from the one of fewest messages to the one of least memory.
ENGINES: Mapping[str, Any] = {
    "ddp": DDPSettings(),
    "{name: fsdp, unit: network}": FSDPSettings(unit="network"),
    "{name: fsdp, unit: blocks}": FSDPSettings(unit="blocks"),
    "{name: fsdp, unit: blocks, gather: bf16}": FSDPSettings(unit="blocks", gather="bf16"),
    "{name: fsdp, reshard: pass}": FSDPSettings(reshard="pass"),
    "{name: fsdp, reshard: pass, gather: bf16}": FSDPSettings(reshard="pass", gather="bf16"),
}


@dataclass(frozen=True)
class NetworkSize:
    """Numbers of a network's parameters."""

    parameters: int
    trained: int
    largest_block: int  # parameters that are gathered at once, where blocks are
    frozen_bytes: int = FLOAT32  # of a parameter that is not trained

    @classmethod
    def of(cls, network: nn.Module) -> "NetworkSize":
        """Return the size of a network, also of one without values."""
        blocks = list[nn.Module]()
        with suppress(DistapError):  # it has none, and is gathered whole
            blocks = [block for _, block in blocks_of(network)]
        frozen = [
            parameter.element_size()
            for parameter in network.parameters()
            if not parameter.requires_grad
        ]
        return cls(
            numel(network),
            sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad),
            max(map(numel, blocks), default=numel(network)),
            min(frozen, default=FLOAT32),
        )

    @property
    def frozen(self) -> int:
        return self.parameters - self.trained


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one of `ranks` ranks, in the state between steps and at the peak of a step.

    Activations, descriptors and pixels come on top.
    """

    engine: Any  # the recipe's section
    size: NetworkSize
    ranks: int
    ranks_of_a_host: int = 8
    states: int = 2  # float32 numbers a parameter that the optimiser keeps, as Adam's two moments
    in_bf16: bool = False  # whether autocast copies float32 weights to bfloat16 in each pass
    averages: bool = False  # whether the trained parameters have a moving average
    evaluates: bool = False  # whether the network is gathered whole to evaluate or to mine

    @cached_property
    def shares(self) -> int:
        """Return into how many parts parameters are cut: 1 if each rank holds all."""
        engine = self.engine
        if isinstance(engine, FSDPSettings) and engine.within == "host":
            return min(self.ranks, self.ranks_of_a_host)
        is_cut = isinstance(engine, FSDPSettings) or getattr(engine, "stage", 0) == 3
        return self.ranks if is_cut else 1

    @property
    def ways_of_optimizer(self) -> int:
        """Return into how many parts the optimiser's state is cut; DeepSpeed cuts it always."""
        return self.ranks if isinstance(self.engine, DeepSpeedSettings) else self.shares

    @property
    def unit(self) -> int:
        """Return the parameters that travel in one message, on average."""
        return self.size.largest_block if self.takes_blocks else self.size.parameters

    @property
    def width(self) -> int:
        """Return the bytes in which a number of the weights is gathered."""
        return BF16 if getattr(self.engine, "gather", "float32") == "bf16" else FLOAT32

    @cached_property
    def frees_blocks(self) -> bool:
        """Return whether a block is freed after each pass through it."""
        return getattr(self.engine, "reshard", "step") == "pass" and self.ranks > 1

    @cached_property
    def takes_blocks(self) -> bool:
        """Return whether blocks are gathered one by one."""
        engine = self.engine
        if not isinstance(engine, FSDPSettings):
            return False
        return goes_by_blocks(self.size.parameters, engine.unit, engine.gather, engine.reshard)

    @cached_property
    def lasting(self) -> dict[str, float]:
        """Return the bytes that are there in all of a step, by content.

        Gradients are there from the first backward pass on: whole, as they are summed over the
        micro-batches, unless each pass reduces them.
        """
        size = self.size
        cut = self.shares
        # DeepSpeed updates a copy of the parameters.
        states = self.states + isinstance(self.engine, DeepSpeedSettings)
        return {
            "weights": (FLOAT32 * size.trained + size.frozen_bytes * size.frozen) / cut,
            "gradients": FLOAT32 * size.trained / (cut if self.frees_blocks else 1),
            "optimizer": FLOAT32 * size.trained * states / self.ways_of_optimizer,
            "average": FLOAT32 * size.trained / cut if self.averages else 0.0,
            "buffer of messages": self.message if getattr(self.engine, "stage", 0) == 3 else 0.0,
        }

    @cached_property
    def gathered(self) -> float:
        """Return the bytes of gathered weights, with the buffers that passes need for them."""
        size = self.size
        if self.shares == 1:
            return 0.0
        if self.frees_blocks:
            return float(OF_PASSES[self.width] * size.largest_block)
        return float(self.width * size.trained + min(self.width, size.frozen_bytes) * size.frozen)

    @cached_property
    def message(self) -> float:
        """Return the bytes of the longest message of gradients, a copy of them."""
        if self.ranks == 1 or self.frees_blocks:
            return 0.0
        trained = FLOAT32 * self.size.trained
        if isinstance(self.engine, DeepSpeedSettings):
            return float(min(trained, FLOAT32 * GREATEST_BUCKET))
        if isinstance(self.engine, FSDPSettings):
            return (
                min(trained, OF_MESSAGES * self.size.largest_block)
                if self.takes_blocks
                else trained
            )
        return float(min(trained, BUCKET_BYTES))

    @property
    def update(self) -> float:
        """Return the bytes that an optimiser on a GPU needs for a group that it updates."""
        return min(FLOAT32 * self.size.trained / self.ways_of_optimizer, GROUP_BYTES)

    @property
    def copies(self) -> float:
        """Return the bytes of autocast's copies, which a graph holds until its backward pass."""
        gathers_bf16 = self.ranks > 1 and self.width == BF16
        return float(BF16 * self.size.parameters) if self.in_bf16 and not gathers_bf16 else 0.0

    @property
    def evaluation(self) -> float:
        """Return the bytes of a network that an evaluation gathers, and passes do not."""
        if not (self.evaluates and self.frees_blocks):
            return 0.0
        return float(self.width * self.size.parameters) - self.lasting["gradients"]

    @property
    def peak(self) -> float:
        """Return the bytes where most are needed: in a pass, in the sum over the ranks after it, in
        the update, or in an evaluation.
        """
        stages = [self.gathered + max(self.message, self.copies), self.update, self.evaluation]
        return sum(self.lasting.values()) + max(stages)


def engines_of(in_bf16: bool) -> dict[str, Any]:
    """Return ENGINES without those that need a network that computes in bf16, unless it does."""
    return {
        name: engine
        for name, engine in ENGINES.items()
        if in_bf16 or getattr(engine, "gather", None) != "bf16"
    }


def described_peaks(
    size: NetworkSize,
    ranks: int,
    room: float,
    *,
    in_bf16: bool = False,
    averages: bool = False,
    evaluates: bool = False,
) -> list[str]:
    """Return a line for each engine: GB of a rank of a host; the first that leaves room is marked.

    Args:
        room: bytes that a rank may use.
        in_bf16, averages, evaluates: as of RankMemory.
    """
    lines = []
    is_found = False
    for name, engine in engines_of(in_bf16).items():
        memory = RankMemory(
            engine, size, ranks, ranks, in_bf16=in_bf16, averages=averages, evaluates=evaluates
        )
        is_first = memory.peak <= room and not is_found
        is_found = is_found or is_first
        mark = "  (the first that fits)" if is_first else ""
        lines.append(f"{memory.peak / 1e9:8.2f} GB  {name}{mark}")
    return lines
