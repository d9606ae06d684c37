"""Ways in which ranks share a network; a recipe chooses one under `engine`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distap.config.recipe import PrecisionName
from distap.errors import DistapError, logger
from distap.stages.deepspeed import ZeroReplica
from distap.stages.fsdp import FSDPReplica, make_contiguous, shard
from distap.stages.replica import Replica, computing_in
from distap.training.learner import Learner, like, set_rates, without_prefix
from distap.world import World

# Their steps depend on the norm or the shape of a whole tensor, but ZeRO gives them flat slices of many tensors.
WHOLE_TENSORS = ("Lamb", "Lars", "Adafactor")
PREFIX = "optimizer.state."
Named = Mapping[str, Tensor]
GREATEST_BUCKET = 500_000_000  # parameters in one message of DeepSpeed
Parts = tuple[nn.Module, World, Callable[[Any], Tensor]]  # network, ranks, and how the network describes images
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
        """Return a learner for a network that is on its device, with the same parameters on every rank."""
        return self._shared((network, world, computing_in(precision, network)), build_optimizer, clip_norm)

    def _shared(self, parts: Parts, build_optimizer: BuildOptimizer, clip_norm: float | None) -> Learner:
        return Learner(Replica(*parts), build_optimizer(), clip_norm)


@dataclass(frozen=True)
class FSDPSettings(DDPSettings):
    """FSDP2: each rank holds a shard of every parameter. A single rank keeps the network as it is."""

    def _shared(self, parts: Parts, build_optimizer: BuildOptimizer, clip_norm: float | None) -> Learner:
        network, world, _ = parts
        if world.size == 1:
            return super()._shared(parts, build_optimizer, clip_norm)
        shard(network, world)
        return Learner(FSDPReplica(*parts), build_optimizer(), clip_norm)


@dataclass(frozen=True)
class DeepSpeedSettings(DDPSettings):
    """DeepSpeed ZeRO: ranks share the optimiser's state and, by stage, gradients and parameters."""

    stage: Literal[1, 2, 3] = 2
    """Shard the optimiser's state (1), also gradients (2), also parameters (3) over ranks."""
    offload: bool = False
    """Keep the optimiser's state in host memory, and update parameters on the CPU."""

    def _shared(self, parts: Parts, build_optimizer: BuildOptimizer, clip_norm: float | None) -> Learner:
        (network, world, _), optimizer = parts, build_optimizer()
        check_for_zero(network, optimizer)
        make_contiguous(network)  # DeepSpeed ignores strides, even of 1 x 1 kernels
        numel = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        config = self.config(world.size, numel, clip_norm)
        replica = ZeroReplica(*parts, optimizer=optimizer, config=config)
        if world.rank == 0:
            zero = replica.engine._config.zero_config.model_dump(mode="json", exclude_none=True, by_alias=True)
            logger.info("DeepSpeed: %s", json.dumps(config | {"zero_optimization": zero}, sort_keys=True))
        return ZeroLearner(replica, optimizer, clip_norm)

    def config(self, ranks: int, numel: int, clip_norm: float | None) -> dict[str, Any]:
        """Return DeepSpeed's configuration, without what the three stages and `Learner` do themselves."""
        bucket = min(numel + numel % 2, GREATEST_BUCKET)  # all trained parameters, in one message
        return {
            "train_batch_size": ranks,
            "train_micro_batch_size_per_gpu": 1,
            # DeepSpeed would divide gradients by the number of accumulation steps, so the configuration says one.
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
                **({"offload_optimizer": {"device": "cpu"}} if self.offload else {}),
            },
        }


class ZeroLearner(Learner):
    """A learner that leaves clipping, the optimiser's step and its state to DeepSpeed."""

    replica: ZeroReplica

    def update(self, learning_rate: float) -> float:
        engine = self.replica.engine
        set_rates(self.replica.zero, learning_rate)
        engine.set_gradient_accumulation_boundary(True)
        with self.world.collective("update of the parameters"):
            engine.step()
            norm = float(engine.get_global_grad_norm())
        if norm < float("inf") and self._average:  # False for NaN as well
            self._follow()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        with self.replica.describing():
            state = {f"network.{name}": tensor.detach() for name, tensor in self.network.state_dict().items()}
            if self.replica.lockstep:
                state = {name: tensor.clone() for name, tensor in state.items()}
        state |= {f"ema.{name}": tensor for name, tensor in self._average.items()}
        with self.world.collective("gathering of the optimizer's state"):
            state |= zero_state(self.replica.zero, self.replica.trained)
        return {name: one.reshape(()) if one.numel() == 1 else one for name, one in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self.world.collective("distribution of the parameters"):
            load_zero_state(self.replica.zero, self.network, self.replica.trained, state)
        self._load_average(state)


def check_for_zero(network: nn.Module, optimizer: Optimizer) -> None:
    """Raise a DistapError if ZeRO cannot hold these parameters or work with this optimiser."""
    for name, parameter in network.named_parameters():
        if parameter.dtype != torch.float32:
            raise DistapError(f"{name} is {parameter.dtype}, but the deepspeed engine needs float32 parameters")
    if type(optimizer).__name__ in WHOLE_TENSORS:
        raise DistapError(
            f"the deepspeed engine gives the optimiser slices of the parameters, but {type(optimizer).__name__} "
            "needs whole ones; choose another optimizer.name, or the engine ddp or fsdp"
        )


def zero_state(zero: Any, trained: Named) -> dict[str, Tensor]:
    """Return whole tensors `optimizer.state.NAME.KEY` of trained parameters; call it on all ranks together."""
    from deepspeed.utils import safe_get_full_optimizer_state

    states = list(zero.optimizer.state.items())
    if not states:  # before the first update
        return {}
    _link(zero)
    flat, entry = states[0]
    return {
        f"{PREFIX}{name}.{key}": safe_get_full_optimizer_state(parameter, key).cpu()
        if value.shape == flat.shape
        else value.detach().clone()
        for key, value in entry.items()
        for name, parameter in trained.items()
    }


def load_zero_state(zero: Any, network: nn.Module, trained: Named, state: Named) -> None:
    """Load whole tensors of any engine's `state_dict`; call it on all ranks together.

    If they hold no state of the optimiser, it stays as it is.
    """
    import deepspeed

    shared = [parameter for parameter in network.parameters() if hasattr(parameter, "ds_id")]
    # Stage 3 takes the values of rank 0; the other stages have nothing to gather.
    with deepspeed.zero.GatheredParameters(shared, modifier_rank=0, enabled=bool(shared)):
        tensors = without_prefix("network.", state)
        present = network.state_dict()
        network.load_state_dict({name: like(present.get(name), tensor) for name, tensor in tensors.items()})
    for name, parameter in trained.items():
        _set(parameter, state[f"network.{name}"], None)
    moments: dict[str, dict[str, Tensor]] = {}  # key -> name of a parameter -> tensor
    for of_parameter, tensor in without_prefix(PREFIX, state).items():
        name, _, key = of_parameter.rpartition(".")
        if name in trained:
            moments.setdefault(key, {})[name] = tensor
    by_parameter = {key for key, values in moments.items() if any(value.ndim for value in values.values())}
    for flat in zero.fp32_partitioned_groups_flat if shared else zero.single_partition_of_fp32_groups:
        entry = zero.optimizer.state[flat]
        for key, values in moments.items():
            if key not in by_parameter:  # the number of steps, the same for all
                entry[key] = next(iter(values.values())).detach().clone()
            elif key not in entry:
                entry[key] = torch.zeros_like(flat)
    if moments:
        _link(zero)
    for key in by_parameter:
        for name, value in moments[key].items():
            _set(trained[name], value, key)


def _link(zero: Any) -> None:
    # DeepSpeed gives parameters access to their state only after an update of the first group, which may have none.
    if hasattr(zero, "_hp_optimizer_states_linked"):  # stages 1 and 2
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _set(parameter: Any, value: Tensor, key: str | None) -> None:
    """Fill this rank's part of a parameter's float32 copy, or of its state `key`, from the whole tensor."""
    from deepspeed import utils

    value = value.detach().to(parameter.device)
    kind = "local" if hasattr(parameter, "ds_id") else "full"
    if kind == "local":  # stage 3 holds slices of the same size, the last one padded
        size, rank = parameter.ds_tensor.numel(), parameter.ds_process_group.rank()
        mine = value.flatten()[rank * size : (rank + 1) * size]
        value = torch.cat([mine, mine.new_zeros(size - len(mine))])
    if key is None:
        getattr(utils, f"safe_set_{kind}_fp32_param")(parameter, value)
    else:
        getattr(utils, f"safe_set_{kind}_optimizer_state")(parameter, value, key)
