"""What DeepSpeed is told: all that it would otherwise assume, with the user's own JSON merged in."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from distap.errors import DistapError

Stage = Literal[1, 2, 3]
SWITCHED_OFF = {"enabled": False}  # a section that asks for nothing
AUTO = "auto"  # other trainers fill such values in; here it means the same as leaving the key out
GREATEST_BUCKET = 500_000_000

# A key that distap decides about -> what to set instead. Anything below it is refused as well.
_OWNED = {
    "train_batch_size": "the images of a batch are `sampling`'s",
    "train_micro_batch_size_per_gpu": "the images of a micro-batch are `replay.size`",
    "gradient_accumulation_steps": "`replay.size` decides how many micro-batches a step has",
    "managed_gradient_accumulation": "gradients are reduced once a step",
    "gradient_clipping": "set `optimizer.clip_norm`",
    "gradient_allreduce_op": "parameters move along the sum over ranks",
    "prescale_gradients": "parameters move along the sum over ranks",
    "gradient_predivide_factor": "parameters move along the sum over ranks",
    "optimizer": "set `optimizer`",
    "scheduler": "set `optimizer.learning_rate` and `optimizer.warmup`",
    "fp16.enabled": "it sums gradients in 16 bits, so they would not be those of the batch; set `precision: fp16`",
    "bf16.enabled": "it sums gradients in 16 bits, so they would not be those of the batch; set `precision: bf16`",
    "bfloat16": "set `precision: bf16`",
    "torch_autocast.enabled": "set `precision`",
    "data_types": "parameters and gradients are float32; set `precision` for what the network computes in",
    "zero_allow_untested_optimizer": "the optimiser is `optimizer`'s",
    "zero_force_ds_cpu_optimizer": "the optimiser is `optimizer`'s, also where its state is offloaded",
    "zero_optimization.stage": "set `engine.stage`",
    "zero_optimization.compute_grad_norm": "a norm that is not finite skips the step",
    "zero_optimization.zero_quantized_weights": "descriptors of describe and of replay would differ",
    "zero_optimization.zero_quantized_nontrainable_weights": "it would not train the network of the recipe",
    "zero_optimization.zero_quantized_gradients": "the gradient would not be that of the batch",
    "zero_optimization.zero_hpz_partition_size": "parameters are shared out over all ranks",
    "zero_optimization.legacy_stage1": "DeepSpeed itself has it no longer",
    "zero_optimization.offload_optimizer.ratio": "a state in two places is in no checkpoint",
    "zero_optimization.offload_optimizer.super_offload": "a state in two places is in no checkpoint",
    "zero_optimization.zenflow": "it updates some parameters later than others",
    "activation_checkpointing": "set `step.activation_checkpointing`",
    "compile": "set `step.compile`",
    "dataloader_drop_last": "the images of a step are `sampling`'s",
    "data_efficiency": "the images of a step are `sampling`'s",
    "autotuning": "no other program may start the training",
    "hybrid_engine": "it is for text",
    "pipeline": "ranks share the images, not the network's layers",
    "tensor_parallel": "ranks share the images, not the network's layers",
    "expert_parallel": "ranks share the images, not the network's layers",
    "sequence_parallel_size": "ranks share the images, not the network's layers",
    "data_parallel_size": "all ranks share the images",
    "use_data_before_expert_parallelism": "ranks share the images, not the network's layers",
    "checkpoint": "set `checkpoint`",
    "load_universal_checkpoint": "checkpoints are distap's",
    "weight_quantization": "it would not train the network of the recipe",
}
_PASSED_ON = {
    "zero_optimization",
    "fp16",
    "bf16",
    "torch_autocast",
    "communication_data_type",
    "disable_allgather",
    "disable_python_gc",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "timers",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "aio",
}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """DeepSpeed ZeRO.

    Args:
        stage: what the ranks share out: 1 the optimiser's state, 2 gradients as well, 3 parameters as well.
        config: a DeepSpeed JSON, for what distap does not decide about, such as offloading or sizes of buckets.
    """

    name: Literal["deepspeed"] = "deepspeed"
    stage: Stage = 2
    config: Path | None = None

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic where it is a config section

    def __post_init__(self) -> None:
        if self.stage not in get_args(Stage):
            raise ValueError(f"stage is {self.stage}; expected 1, 2 or 3")


def merged_config(settings: DeepSpeedSettings, ranks: int, numel: int, clip_norm: float | None) -> dict[str, Any]:
    """The configuration for DeepSpeed.

    Args:
        settings: names the user's own JSON.
        ranks: W.
        numel: number of trained parameters; all of them are reduced as one bucket, up to a bound.
        clip_norm: the gradient's norm is clipped to it.
    Raises:
        DistapError: the JSON cannot be read, or wants something that distap decides about.
    """
    bucket = min(numel + numel % 2, GREATEST_BUCKET)
    ours: dict[str, Any] = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": True,
        # Absent, it means 1.0 since 0.19.
        "gradient_clipping": clip_norm or 0.0,
        "gradient_allreduce_op": "mean",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": settings.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
        },
    }
    if settings.config is not None:
        _merge(ours, _read(settings.config), settings.config, ())
    return ours


def complete(config: dict[str, Any]) -> None:
    """Write out what ZeRO would assume for the keys that are absent.

    Raises:
        ValueError: a key or value of `zero_optimization` is none of DeepSpeed's.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(**config["zero_optimization"])
    renamed = {
        name for name, field in type(zero).model_fields.items() if "deprecated" in (field.json_schema_extra or {})
    }
    config["zero_optimization"] = zero.model_dump(mode="json", exclude_none=True, by_alias=True, exclude=renamed)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise DistapError(f"{path}: engine.config cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DistapError(f"{path}: engine.config is no JSON that DeepSpeed could read: {error}") from error
    if not isinstance(content, dict):
        raise DistapError(f"{path}: engine.config holds a {type(content).__name__}; expected an object of keys")
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return content


def _merge(ours: dict[str, Any], theirs: dict[str, Any], path: Path, parents: tuple[str, ...]) -> None:
    """Take over what the user sets, key by key."""
    for name, value in theirs.items():
        key = ".".join((*parents, name))
        if value in (AUTO, SWITCHED_OFF):
            continue
        if key in _OWNED:
            if name not in ours or ours[name] != value:
                expected = f" other than {json.dumps(ours[name])}" if name in ours else ""
                raise DistapError(
                    f"{path}: {key} is {json.dumps(value)}: distap takes no value of it{expected}: {_OWNED[key]}"
                )
        elif not parents and name not in _PASSED_ON:
            raise DistapError(f"{path}: {key} is no key of DeepSpeed's that distap knows{_meant(name)}")
        elif isinstance(value, dict):
            _merge(ours.setdefault(name, {}), value, path, (*parents, name))
        elif isinstance(ours.get(name), dict):
            raise DistapError(f"{path}: {key} is {json.dumps(value)}; expected an object of keys")
        elif name == "device" and value == "nvme":
            raise DistapError(
                f'{path}: {key} is "nvme": what lies there is in no checkpoint of distap\'s; set it to "cpu"'
            )
        else:
            ours[name] = value


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, _PASSED_ON | {key.split(".")[0] for key in _OWNED}, 1)
    return f"; {close[0]} is one" if close else ""
