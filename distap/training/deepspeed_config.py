"""The configuration for DeepSpeed: distap's own with the user's JSON merged in."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from distap.errors import DistapError
from distap.registry import suggestion

SWITCHED_OFF = {"enabled": False}  # a section that asks for nothing
AUTO = "auto"  # other trainers fill such values in; here it is the same as no key
GREATEST_BUCKET = 500_000_000

_PASSED_ON = (
    *("zero_optimization", "fp16", "bf16", "torch_autocast", "communication_data_type", "disable_allgather", "aio"),
    *("disable_python_gc", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"),
    *("timers", "flops_profiler", "comms_logger", "tensorboard", "wandb", "comet", "csv_monitor"),
)
# Why distap refuses a key, or what to set instead -> the keys. The keys below them are refused too.
_REASONS = {
    "set `sampling`": ("train_batch_size", "dataloader_drop_last", "data_efficiency"),
    "set `replay.size`": ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "set `optimizer`": ("optimizer", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    "set `optimizer.clip_norm`": ("gradient_clipping",),
    "set `schedule`": ("scheduler",),
    "set `precision`": ("torch_autocast.enabled",),
    "set `precision: bf16`": ("bfloat16",),
    "set `precision`; parameters and gradients stay float32": ("data_types",),
    "it sums gradients in 16 bits; set `precision: fp16`": ("fp16.enabled",),
    "it sums gradients in 16 bits; set `precision: bf16`": ("bf16.enabled",),
    "set `engine.stage`": ("zero_optimization.stage",),
    "set `step.activation_checkpointing`": ("activation_checkpointing",),
    "set `step.compile`": ("compile",),
    "set `checkpoint`": ("checkpoint", "load_universal_checkpoint"),
    "the gradient would not be that of the batch": (
        *("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"),
        "zero_optimization.zero_quantized_gradients",
    ),
    "ranks share out the images, not the network's layers": (
        *("pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size"),
    ),
    "checkpoints would not hold all of the state": (
        "zero_optimization.offload_optimizer.ratio",
        "zero_optimization.offload_optimizer.super_offload",
    ),
    "ranks reduce gradients once a step": ("managed_gradient_accumulation",),
    "steps whose norm is not finite are skipped": ("zero_optimization.compute_grad_norm",),
    "describe and replay would give different descriptors": ("zero_optimization.zero_quantized_weights",),
    "it would change the network": ("zero_optimization.zero_quantized_nontrainable_weights",),
    "all ranks share out the parameters": ("zero_optimization.zero_hpz_partition_size",),
    "DeepSpeed has removed it": ("zero_optimization.legacy_stage1",),
    "it updates some parameters later than others": ("zero_optimization.zenflow",),
    "it would start the training by itself": ("autotuning",),
}
_REFUSED = {key: reason for reason, keys in _REASONS.items() for key in keys}


def merged_config(stage: int, path: Path | None, ranks: int, numel: int, clip_norm: float | None) -> dict[str, Any]:
    """Return distap's configuration for DeepSpeed, with the user's JSON file merged in.

    All `numel` trained parameters are reduced as one bucket, up to a bound.
    """
    bucket = min(numel + numel % 2, GREATEST_BUCKET)
    ours: dict[str, Any] = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": True,
        # Since 0.19 an absent key means 1.0.
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
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
        },
    }
    if path is not None:
        _merge(ours, _read(path), path, ())
    return ours


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise DistapError(f"{path}: engine.config cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DistapError(f"{path}: engine.config is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DistapError(f"{path}: engine.config holds a {type(content).__name__}; expected an object of keys")
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise ValueError(f"the key {name!r} appears twice")
    return dict(pairs)


def _merge(ours: dict[str, Any], theirs: dict[str, Any], path: Path, parents: tuple[str, ...]) -> None:
    for name, value in theirs.items():
        key = ".".join((*parents, name))
        if value in (AUTO, SWITCHED_OFF):
            continue
        if key in _REFUSED:
            if name not in ours or ours[name] != value:
                raise DistapError(f"{path}: {key} is {json.dumps(value)}, but distap decides it: {_REFUSED[key]}")
        elif not parents and name not in _PASSED_ON:
            raise DistapError(f"{path}: distap does not pass on {key} to DeepSpeed; {suggestion(name, _PASSED_ON)}")
        elif isinstance(value, dict):
            _merge(ours.setdefault(name, {}), value, path, (*parents, name))
        elif isinstance(ours.get(name), dict):
            raise DistapError(f"{path}: {key} is {json.dumps(value)}; expected an object of keys")
        elif name == "device" and value == "nvme":
            raise DistapError(f'{path}: {key} is "nvme", which checkpoints do not hold; set it to "cpu"')
        else:
            ours[name] = value
