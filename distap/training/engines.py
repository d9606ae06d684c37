"""Ways in which ranks share a network; a recipe chooses one under `engine`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from distap.config.recipe import PrecisionName
from distap.errors import logger
from distap.world import World

if TYPE_CHECKING:
    from distap.training.learner import Learner

GREATEST_BUCKET = 500_000_000  # parameters in one message of DeepSpeed
# network, ranks, and how the network describes images
Parts = tuple[nn.Module, World, Callable[[Any], Tensor]]
# over the network's parameters, which FSDP has replaced by shards then
BuildOptimizer = Callable[[], Optimizer]


@dataclass(frozen=True)
class DDPSettings:
    """Data parallel: each rank holds the whole network, and gradients are all-reduced once per
    step.
    """

    def build(
        self,
        network: nn.Module,
        build_optimizer: BuildOptimizer,
        world: World,
        clip_norm: float | None = None,
        precision: PrecisionName = "float32",
    ) -> "Learner":
        """Return a learner for a network that is on its device, with the same parameters on every
        rank.
        """
        # here and below, since a recipe is read without it
        from distap.stages.replica import computing_in

        return self._shared(
            (network, world, computing_in(precision, network)), build_optimizer, clip_norm
        )

    def _shared(
        self, parts: Parts, build_optimizer: BuildOptimizer, clip_norm: float | None
    ) -> "Learner":
        from distap.stages.replica import Replica
        from distap.training.learner import Learner

        return Learner(Replica(*parts), build_optimizer(), clip_norm)


@dataclass(frozen=True)
class FSDPSettings(DDPSettings):
    """FSDP2: each rank holds a shard of every parameter. A single rank keeps the network as it
    is."""

    def _shared(
        self, parts: Parts, build_optimizer: BuildOptimizer, clip_norm: float | None
    ) -> "Learner":
        network, world, _ = parts
        if world.size == 1:
            return super()._shared(parts, build_optimizer, clip_norm)
        from distap.stages.fsdp import FSDPReplica, shard
        from distap.training.learner import Learner

        shard(network, world)
        return Learner(FSDPReplica(*parts), build_optimizer(), clip_norm)


@dataclass(frozen=True)
class DeepSpeedSettings(DDPSettings):
    """DeepSpeed ZeRO: ranks share the optimiser's state and, by stage, gradients and parameters."""

    stage: Literal[1, 2, 3] = 2
    """Shard the optimiser's state (1), also gradients (2), also parameters (3) over ranks."""

    def _shared(
        self, parts: Parts, build_optimizer: BuildOptimizer, clip_norm: float | None
    ) -> "Learner":
        from distap.stages.deepspeed import ZeroReplica
        from distap.stages.fsdp import make_contiguous
        from distap.training.zero import ZeroLearner, check_for_zero

        network, world, _ = parts
        optimizer = build_optimizer()
        check_for_zero(network, optimizer)
        make_contiguous(network)  # DeepSpeed ignores strides, even of 1 x 1 kernels
        numel = sum(
            parameter.numel() for group in optimizer.param_groups for parameter in group["params"]
        )
        config = self.config(world.size, numel, clip_norm)
        replica = ZeroReplica(*parts, optimizer=optimizer, config=config)
        if world.rank == 0:
            zero = replica.engine._config.zero_config.model_dump(
                mode="json", exclude_none=True, by_alias=True
            )
            logger.info(
                "DeepSpeed: %s", json.dumps(config | {"zero_optimization": zero}, sort_keys=True)
            )
        return ZeroLearner(replica, optimizer, clip_norm)

    def config(self, ranks: int, numel: int, clip_norm: float | None) -> dict[str, Any]:
        """Return DeepSpeed's configuration, without what the three stages and `Learner` do
        themselves.
        """
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
