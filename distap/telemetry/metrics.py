"""Export the Prometheus metrics of one rank from one table of declarations.

Names follow the Prometheus conventions. Figures that are the same on every rank (loss, learning
rate, validation) are exported by rank 0 only, so that sums over ranks mean something.
"""

import os
import platform
import resource
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    Summary,
    disable_created_metrics,
)
from prometheus_client.process_collector import ProcessCollector

import distap

STAGES = ("data_wait", "describe", "gather", "rank", "replay", "reduce", "optimizer")
BETWEEN_STEPS = ("evaluation", "checkpoint")
ENDINGS = ("done", "stopped")  # stopped on request, with a checkpoint

# Attribute of TrainingMetrics: class, name after `distap_` (Counters get `_total`), help, labels.
OF_RANK: dict[str, tuple[Any, ...]] = {
    "steps": (Counter, "steps", "Training steps done by this process"),
    "images": (Counter, "images", "Images that this rank took through a stage", "stage"),
    "stage_seconds": (
        Summary,
        "stage_duration_seconds",
        "Seconds by stage of a step and between steps",
        "stage",
    ),
    "images_per_second": (Gauge, "images_per_second", "Images of this rank a second, last step"),
    "skipped": (Counter, "samples_skipped", "Damaged images left out", "reason"),
    "read_bytes": (
        Counter,
        "data_read_bytes",
        "Bytes of shards that this rank has read",
    ),
    "used_bytes": (Counter, "data_used_bytes", "Bytes of images, or of whole shards, among those"),
    "requests": (Counter, "data_requests", "Requests for bytes of shards"),
    "retries": (Counter, "data_read_retries", "Reads that were tried again"),
    "cache_hits": (Counter, "data_cache_hits", "Images read from data.cache"),
    "cache_misses": (Counter, "data_cache_misses", "Images read from the store beside data.cache"),
    "cache_wait": (
        Counter,
        "data_cache_wait_seconds",
        "Seconds that workers waited for a shard to come into data.cache",
    ),
    "step": (Gauge, "step", "Steps behind the present state"),
    "last_step": (Gauge, "last_step_timestamp_seconds", "When the last step ended"),
    "restarts": (Gauge, "restarts", "Times that this launcher has started the ranks again"),
    "host_memory": (Gauge, "host_memory_peak_bytes", "Greatest resident memory so far"),
    "device_memory": (Gauge, "device_memory_peak_bytes", "Greatest GPU memory so far"),
}
GLOBAL: dict[str, tuple[Any, ...]] = {
    "ranks": (Gauge, "world_size_ranks", "Ranks of the training"),
    "batch": (Gauge, "global_batch_size_images", "Images of a global batch"),
    "planned_steps": (Gauge, "planned_steps", "Steps of the whole training"),
    "ended": (Gauge, "ended", "1 once the training is done, or stops on request", "reason"),
    "loss": (Gauge, "loss", "Loss of the global batch"),
    "batch_mAP": (
        Gauge,
        "batch_mean_average_precision_ratio",
        "Mean AP of the batch; NaN unless the loss is 1 - AP",
    ),
    "learning_rate": (Gauge, "learning_rate", "Learning rate"),
    "gradient_norm": (Gauge, "gradient_norm", "Norm of the gradient before clipping"),
    "spread": (
        Gauge,
        "descriptor_spread_ratio",
        "Mean squared distance of the batch's descriptors to their mean",
    ),
    "replay_drift": (
        Gauge,
        "replay_drift",
        "Greatest difference between the two descriptors of an image in a step",
    ),
    "loss_scale": (Gauge, "loss_scale", "Factor on gradients in float16; 1 in other precisions"),
    "replay_drift_limit": (Gauge, "replay_drift_limit", "Replay drift above which training stops"),
    "replayed_share": (
        Gauge,
        "replayed_images_ratio",
        "Share of a batch's images that replay described again",
    ),
    "kept_share": (
        Gauge,
        "kept_graph_images_ratio",
        "Share of a batch's images whose graph was kept from describe",
    ),
    "skipped_queries": (
        Counter,
        "queries_without_positive",
        "Images without another of their class in the batch",
    ),
    "set_images": (Counter, "set_images", "Images of each of several data sets", "dataset"),
    "set_skipped": (
        Counter,
        "set_samples_skipped",
        "Damaged images of each of several data sets",
        "dataset",
    ),
    "set_loss": (Gauge, "set_loss", "Mean loss of each of several data sets' queries", "dataset"),
    "nonfinite": (
        Counter,
        "nonfinite_steps",
        "Steps skipped because a number was not finite",
        "what",
    ),
    "evaluation": (
        Gauge,
        "evaluation_figure_ratio",
        "A figure of retrieval on a data set",
        "dataset",
        "figure",
    ),
    "chosen_by": (
        Gauge,
        "best_checkpoint_info",
        "Always 1: the data set and the figure that choose the best checkpoint",
        "dataset",
        "figure",
    ),
    "since_best": (
        Gauge,
        "evaluations_since_best",
        "Evaluations in a row that have not raised the figure that chooses the best checkpoint",
    ),
    "checkpoint_seconds": (Summary, "checkpoint_duration_seconds", "Seconds to write a checkpoint"),
    "checkpoint_bytes": (Gauge, "checkpoint_size_bytes", "Size of the last checkpoint"),
    "checkpoint_time": (
        Gauge,
        "checkpoint_last_success_timestamp_seconds",
        "When the last checkpoint was written",
    ),
    "checkpoint_step": (Gauge, "checkpoint_step", "Steps behind the newest checkpoint"),
    "checkpoint_interval": (Gauge, "checkpoint_interval_steps", "Steps between two checkpoints"),
    "checkpoint_failures": (
        Counter,
        "checkpoint_failures",
        "Checkpoints that could not be written",
    ),
}


class TrainingMetrics(SimpleNamespace):
    """Metrics of one rank: an attribute for each key of the tables. Rank 0 also exports GLOBAL."""

    def __init__(
        self,
        is_first: bool,
        skip_reasons: tuple[str, ...],
        registry: CollectorRegistry,
        device: str = "cpu",
    ) -> None:
        # On the other ranks global metrics go to a registry that nobody reads, so that no caller
        # has to ask its rank.
        elsewhere = registry if is_first else CollectorRegistry()
        disable_created_metrics()  # a series more for each counter and summary, which nothing reads
        for table, target in ((OF_RANK, registry), (GLOBAL, elsewhere)):
            for attribute, (kind, name, text, *labels) in table.items():
                metric = kind(name, text, labels, namespace="distap", registry=target)
                setattr(self, attribute, metric)
        ProcessCollector(registry=registry)
        Info("build", "Versions", namespace="distap", registry=registry).info(
            {
                "version": distap.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": device,
            }
        )
        # Each request runs in a thread of its own, where CUDA's current GPU is always the first, so
        # name this one.
        if torch.cuda.is_available():
            gpu = torch.cuda.current_device()
            self.device_memory.set_function(lambda: torch.cuda.max_memory_allocated(gpu))
        self.host_memory.set_function(host_memory_peak)
        self.restarts.set(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        # Series that exist from the start can be alerted on before their first event.
        for metric, values in (
            (self.stage_seconds, (*STAGES, *BETWEEN_STEPS)),
            (self.images, ("describe", "replay")),
            (self.skipped, skip_reasons),
            (self.nonfinite, ("descriptor", "loss", "gradient", "overflow")),
            (self.ended, ENDINGS),
        ):
            for value in values:
                metric.labels(value)

    def observe_step(
        self,
        step: int,
        images: int,
        seconds: Mapping[str, float],
        figures: Mapping[str, float],
        skipped: str | None,
    ) -> None:
        """Record a step of this rank.

        Args:
            images: their number on this rank.
            seconds: by stage, and of the whole `step`.
            figures: values of other metrics by attribute.
            skipped: `descriptor`, `loss` or `gradient` if that was not finite, or `overflow` of
                the scaled gradient, so that the parameters did not move.
        """
        self.steps.inc()
        self.step.set(step)
        self.last_step.set_to_current_time()
        self.images.labels("describe").inc(images)
        self.images.labels("replay").inc(images * figures["replayed_share"])
        self.images_per_second.set(images / seconds["step"])
        for stage in STAGES:
            self.stage_seconds.labels(stage).observe(seconds.get(stage, 0.0))
        for name, figure in figures.items():
            getattr(self, name).set(figure)
        if skipped:
            self.nonfinite.labels(skipped).inc()


def device_memory(device: torch.device) -> dict[str, dict[str, int]]:
    """Return the device's memory of this process, in bytes, as `device_memory`.

    `allocated` is in tensors now, `peak` was at most so far, and `reserved` is what torch has taken
    from the driver; {} for a device whose memory torch does not manage.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "memory_stats"):
        return {}
    stats = module.memory_stats(device)
    names = {
        "allocated": "allocated_bytes.all.current",
        "peak": "allocated_bytes.all.peak",
        "reserved": "reserved_bytes.all.current",
    }
    return {"device_memory": {name: stats[key] for name, key in names.items()}}


def host_memory_peak() -> int:
    """Return this process's peak resident memory so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
