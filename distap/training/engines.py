"""The ways in which ranks can share a network, as a recipe chooses one under `engine`."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from distap.precision import PrecisionName, computing_in
from distap.stages.fsdp import FSDPReplica, make_contiguous, shard
from distap.stages.replica import Replica
from distap.training.deepspeed_config import merged_config
from distap.training.learner import Learner
from distap.world import World

logger = logging.getLogger("distap")
BuildOptimizer = Callable[[], Optimizer]  # over the network's parameters, which FSDP has replaced by shards then


@dataclass(frozen=True)
class DDPSettings:
    """Data parallel: each rank holds the whole network, and gradients are all-reduced once per step."""

    def build(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        clip_norm: float | None = None,
        precision: PrecisionName = "float32",
    ) -> Learner:
        """Return a learner of the network, which is on its device with the same parameters on every rank."""
        replica = Replica(network, world, computing_in(precision, network))
        return Learner(replica, build_optimizer(), clip_norm, precision)


@dataclass(frozen=True)
class FSDPSettings:
    """FSDP2: each rank holds a shard of every parameter. A single rank keeps the network as it is."""

    reshard: bool = False
    """Keep a block's parameters only while it computes in stage three, to save memory."""

    def build(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        clip_norm: float | None = None,
        precision: PrecisionName = "float32",
    ) -> Learner:
        """Return a learner of the network; ranks take the parameters of rank 0."""
        if world.size == 1:
            return DDPSettings().build(network, build_optimizer, world, clip_norm, precision)
        scalars = shard(network, world, by_block=self.reshard)
        replica = FSDPReplica(network, world, computing_in(precision, network), reshard=self.reshard)
        return Learner(replica, build_optimizer(), clip_norm, precision, scalars)


@dataclass(frozen=True)
class DeepSpeedSettings:
    """DeepSpeed ZeRO."""

    stage: Literal[1, 2, 3] = 2
    """Ranks share out the optimiser's state (1), gradients too (2), parameters too (3)."""
    config: Path | None = None
    """DeepSpeed JSON file for options that distap does not set, such as offloading."""

    def build(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        clip_norm: float | None = None,
        precision: PrecisionName = "float32",
    ) -> Learner:
        """Return a learner of the network, which has the same float32 parameters on every rank."""
        from distap.stages.deepspeed import ZeroReplica
        from distap.training.zero import ZeroLearner, check_for_zero

        optimizer = build_optimizer()
        check_for_zero(network, optimizer)
        scalars = make_contiguous(network)  # DeepSpeed ignores strides, even of 1 x 1 kernels
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numel = sum(parameter.numel() for parameter in trained)
        config = merged_config(self.stage, self.config, world.size, numel, clip_norm)
        replica = ZeroReplica(
            network,
            world,
            computing_in(precision, network),
            optimizer=optimizer,
            config=config,
            where=str(self.config or "engine"),
        )
        if world.rank == 0:
            zero = replica.engine._config.zero_config.model_dump(mode="json", exclude_none=True, by_alias=True)
            told = json.dumps(config | {"zero_optimization": zero}, sort_keys=True)
            logger.info("DeepSpeed: %s", told)
        return ZeroLearner(replica, optimizer, clip_norm, precision, scalars)
