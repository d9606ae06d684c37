"""Ways in which ranks share a network; a recipe chooses one under `engine`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from distap.config.sections import PrecisionName
from distap.errors import DistapError, logger
from distap.world import World

if TYPE_CHECKING:
    from distap.training.learner import Learner

GREATEST_BUCKET = 500_000_000  # parameters in one message of DeepSpeed
# Describes images with the network, in the precision of the recipe.
Describe = Callable[[Any], Tensor]
# over the network's parameters, which FSDP has replaced by shards then
BuildOptimizer = Callable[[], Optimizer]


@dataclass(frozen=True)
class DDPSettings:
    """Data parallel: each rank holds the whole network; one all-reduce of gradients per step."""

    def build(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        clip_norm: float | None = None,
        precision: PrecisionName = "float32",
    ) -> "Learner":
        """Return a learner for a network that is on its device, alike on every rank."""
        # Imported here and below, since a recipe is read without torch's distributed parts.
        from distap.stages.replica import computing_in
        from distap.training.learner import Learner
        from distap.training.loss_scale import ScaledLearner

        describe = computing_in(precision, network)
        kind = ScaledLearner if precision == "fp16" else Learner
        return self._shared(network, world, describe, build_optimizer, clip_norm, kind)

    def _shared(
        self,
        network: nn.Module,
        world: World,
        describe: Describe,
        build_optimizer: BuildOptimizer,
        clip_norm: float | None,
        kind: type["Learner"],
    ) -> "Learner":
        from distap.stages.replica import Replica

        return kind(Replica(network, world, describe), build_optimizer(), clip_norm)


@dataclass(frozen=True)
class FSDPSettings(DDPSettings):
    """FSDP2: each rank holds a shard of every parameter; a single rank shards nothing."""

    unit: Literal["auto", "network", "blocks"] = "auto"
    """Gather the whole network in one message, or each of its blocks; auto takes blocks from 10^9
    parameters on, and where gather or reshard need them."""
    gather: Literal["float32", "bf16"] = "float32"
    """Gather matrices of blocks in this dtype; bf16 goes with precision: bf16."""
    reshard: Literal["step", "pass"] = "step"
    """Free gathered parameters after each step, or each block after each pass through it, which
    takes least memory and most messages."""
    within: Literal["all", "host"] = "all"
    """Cut parameters among all ranks, or among those of a host, with copies on each host."""

    def __post_init__(self) -> None:
        for key, default in (("gather", "float32"), ("reshard", "step")):
            value = getattr(self, key)
            if self.unit == "network" and value != default:
                raise ValueError(f"{key} is {value}, which goes block by block: set unit to blocks")

    def _shared(
        self,
        network: nn.Module,
        world: World,
        describe: Describe,
        build_optimizer: BuildOptimizer,
        clip_norm: float | None,
        kind: type["Learner"],
    ) -> "Learner":
        from distap.model.network import RetrievalNetwork
        from distap.stages.fsdp import FSDPReplica, blocks_to_gather, shard
        from distap.training.filling import fill_shards

        if world.size == 1:
            # Refused on one rank, as in a dry run, if it would be on several.
            blocks_to_gather(network, self.unit, self.gather, self.reshard)
            return super()._shared(network, world, describe, build_optimizer, clip_norm, kind)
        whole = dict(network.named_parameters())
        shard(
            network,
            world,
            unit=self.unit,
            gather=self.gather,
            reshard=self.reshard,
            within=self.within,
        )
        if isinstance(network, RetrievalNetwork) and network.awaits_values:
            fill_shards(network, whole, world)
            network.awaits_values = False
        replica = FSDPReplica(network, world, describe, reshard=self.reshard)
        return kind(replica, build_optimizer(), clip_norm)


@dataclass(frozen=True)
class DeepSpeedSettings(DDPSettings):
    """DeepSpeed ZeRO: ranks share the optimiser's state and, by stage, gradients and parameters."""

    stage: Literal[1, 2, 3] = 2
    """Shard the optimiser's state (1), also gradients (2), also parameters (3) over ranks."""

    def _shared(
        self,
        network: nn.Module,
        world: World,
        describe: Describe,
        build_optimizer: BuildOptimizer,
        clip_norm: float | None,
        kind: type["Learner"],
    ) -> "Learner":
        from distap.stages.deepspeed import ZeroReplica
        from distap.stages.fsdp import make_contiguous
        from distap.training.learner import Learner
        from distap.training.zero import ZeroLearner, check_for_zero

        if kind is not Learner:
            raise DistapError(
                "engine.wrong_precision",
                "precision: fp16 needs a loss scale, which DeepSpeed would keep in another way"
                " next to its own clipping; choose the engine ddp or fsdp, or precision: bf16",
            )
        optimizer = build_optimizer()
        check_for_zero(network, optimizer)
        make_contiguous(network)  # DeepSpeed ignores strides, even of 1 x 1 kernels
        numel = sum(
            parameter.numel() for group in optimizer.param_groups for parameter in group["params"]
        )
        config = self.config(world.size, numel, clip_norm)
        replica = ZeroReplica(network, world, describe, optimizer=optimizer, config=config)
        if world.rank == 0:
            zero = replica.engine._config.zero_config.model_dump(
                mode="json", exclude_none=True, by_alias=True
            )
            logger.info(
                "DeepSpeed: %s", json.dumps(config | {"zero_optimization": zero}, sort_keys=True)
            )
        return ZeroLearner(replica, optimizer, clip_norm)

    def config(self, ranks: int, numel: int, clip_norm: float | None) -> dict[str, Any]:
        """Return DeepSpeed's configuration, with all off that the three stages and `Learner` do."""
        bucket = min(numel + numel % 2, GREATEST_BUCKET)  # all trained parameters, in one message
        return {
            "train_batch_size": ranks,
            "train_micro_batch_size_per_gpu": 1,
            # DeepSpeed would divide gradients by the number of accumulation steps, so the
            # configuration says one.
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": True,
            "gradient_clipping": clip_norm or 0.0,  # since 0.19 an absent key means 1.0
            "gradient_allreduce_op": "mean",
            "prescale_gradients": False,
            "gradient_predivide_factor": 1.0,
            "communication_data_type": "fp32",
            # Gradients are summed in float32; `precision` says in which dtype the network computes.
            **{name: {"enabled": False} for name in ("fp16", "bf16", "torch_autocast")},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "overlap_comm": False,
            },
        }
