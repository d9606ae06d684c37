"""Prometheus metrics, one endpoint a rank.

Names follow the Prometheus conventions. What is the same on every rank (loss, learning rate, validation) is
exported by rank 0 only, so that sums over ranks mean something.
"""

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.process_collector import ProcessCollector

from distap import __version__

STAGES = ("data_wait", "describe", "gather", "rank", "replay", "reduce", "optimizer")
BETWEEN_STEPS = ("evaluation", "checkpoint")
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class TrainingMetrics:
    """The metrics of one rank.

    Args:
        is_first: whether this is rank 0, which also exports what is global.
        ranks: W.
        batch: B, images of a global batch.
        skip_reasons: why an image can be left out.
        registry: where the metrics are kept; a fresh one by default.
    """

    def __init__(
        self,
        is_first: bool,
        ranks: int,
        batch: int,
        skip_reasons: tuple[str, ...],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._define_of_rank({"registry": self.registry, "namespace": "distap"})
        # A registry that no one reads keeps `observe_step` free of questions about the rank.
        self._define_global({"registry": self.registry if is_first else CollectorRegistry(), "namespace": "distap"})
        # Whoever asks does so in a thread of its own, for which CUDA's present GPU is always the first.
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.device_utilization.set_function(lambda: _utilization(gpu))
        self.restarts.set(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        self.ranks.set(ranks)
        self.batch.set(batch)
        # Series that exist from the start can be alerted on before their first event.
        for stage in (*STAGES, *BETWEEN_STEPS):
            self.stage_seconds.labels(stage)
        for stage in ("describe", "replay"):
            self.images.labels(stage)
        for reason in skip_reasons:
            self.skipped.labels(reason)
        for what in ("loss", "gradient"):
            self.nonfinite.labels(what)
        for result in ("hit", "miss"):
            self.cache_requests.labels(result)

    def _define_of_rank(self, where: dict[str, Any]) -> None:
        """What each rank exports of itself."""
        ProcessCollector(registry=self.registry)
        Info("build", "Versions", **where).info(
            {"version": __version__, "torch": torch.__version__, "python": platform.python_version()}
        )
        self.steps = Counter("steps", "Training steps done by this process", **where)
        self.images = Counter("images", "Images that this rank took through a stage", ["stage"], **where)
        self.stage_seconds = Histogram(
            "stage_duration_seconds",
            "Seconds by stage of a step, and of what comes between steps",
            ["stage"],
            buckets=BUCKETS,
            **where,
        )
        self.images_per_second = Gauge("images_per_second", "Images of this rank a second, last step", **where)
        self.skipped = Counter("samples_skipped", "Damaged images left out", ["reason"], **where)
        self.read_bytes = Counter("data_read_bytes", "Bytes of shards read by this rank's workers", **where)
        self.read_retries = Counter("data_read_retries", "Reads that were tried again", **where)
        self.cache_requests = Counter(
            "data_cache_requests", "Reads that the shard cache did or did not answer", ["result"], **where
        )
        self.spool_size = Gauge("spool_size_bytes", "Size of this rank's spool file of pixels", **where)
        self.spool_limit = Gauge("spool_limit_bytes", "What the spool file could take of its disk", **where)
        self.step = Gauge("step", "Steps behind the present state", **where)
        self.last_step = Gauge("last_step_timestamp_seconds", "When the last step ended", **where)
        self.restarts = Gauge("restarts", "Times that the launcher has started the ranks again", **where)
        self.startup_seconds = Gauge(
            "startup_duration_seconds",
            "Seconds from the cold process to the first step, by phase",
            ["phase"],
            **where,
        )
        self.host_memory = Gauge("host_memory_peak_bytes", "Greatest resident memory so far", **where)
        self.device_memory = Gauge("device_memory_peak_bytes", "Greatest GPU memory so far", **where)
        self.device_utilization = Gauge(
            "device_utilization_ratio", "Share of the last second in which the GPU computed, NaN without one", **where
        )

    def _define_global(self, where: dict[str, Any]) -> None:
        """What is the same on every rank."""
        self.ranks = Gauge("world_size_ranks", "Ranks of the training", **where)
        self.batch = Gauge("global_batch_size_images", "Images of a global batch", **where)
        self.planned_steps = Gauge("planned_steps", "Steps of the whole training", **where)
        self.loss = Gauge("loss_ratio", "Loss of the global batch", **where)
        self.batch_ap = Gauge(
            "batch_mean_average_precision_ratio",
            "Mean AP of the global batch as the loss approximates it, NaN where the loss is none of an AP",
            **where,
        )
        self.learning_rate = Gauge("learning_rate", "Learning rate", **where)
        self.gradient_norm = Gauge("gradient_norm", "Norm of the gradient before clipping", **where)
        self.replay_drift = Gauge(
            "replay_drift", "Greatest difference between the two descriptors of an image in a step", **where
        )
        self.replay_drift_limit = Gauge("replay_drift_limit", "Replay drift above which training stops", **where)
        self.replayed = Gauge(
            "replayed_images_ratio",
            "Share of a batch's images that replay described again for their gradient",
            **where,
        )
        self.kept = Gauge(
            "kept_graph_images_ratio", "Share whose graph was kept from describe; the rest had no gradient", **where
        )
        self.lonely_queries = Counter(
            "queries_without_positive", "Images without another of their class in the batch", **where
        )
        self.nonfinite = Counter("nonfinite_steps", "Steps skipped since a number was not finite", ["what"], **where)
        self.validation = Gauge(
            "validation_mean_average_precision_ratio", "mAP on a validation set", ["dataset"], **where
        )
        self.evaluation = Gauge(
            "evaluation_figure_ratio", "A figure of retrieval on a data set", ["dataset", "figure"], **where
        )
        self.checkpoint_seconds = Histogram(
            "checkpoint_duration_seconds", "Seconds to write a checkpoint", buckets=BUCKETS, **where
        )
        self.checkpoint_bytes = Gauge("checkpoint_size_bytes", "Size of the last checkpoint", **where)
        self.checkpoint_time = Gauge(
            "checkpoint_last_success_timestamp_seconds", "When the last checkpoint was written", **where
        )
        self.checkpoint_step = Gauge("checkpoint_step", "Steps behind the newest checkpoint", **where)
        self.checkpoint_interval = Gauge("checkpoint_interval_steps", "Steps between two checkpoints", **where)
        self.logger_lines_lost = Counter(
            "logger_lines_lost", "Figures that a logger beside Prometheus did not take", ["logger"], **where
        )
        self.checkpoint_failures = Counter("checkpoint_failures", "Checkpoints that could not be written", **where)

    def observe_step(
        self, step: int, images: int, seconds: Mapping[str, float], figures: Mapping[str, float], skipped: str | None
    ) -> None:
        """Take over what a step did.

        Args:
            step: steps behind the present state.
            images: of this rank.
            seconds: by stage, and `step` for the whole.
            figures: loss, batch_mAP, learning_rate, gradient_norm, replay_drift, replayed_share, kept_share and
                skipped_queries.
            skipped: `loss` or `gradient` where the parameters did not move.
        """
        self.steps.inc()
        self.step.set(step)
        self.last_step.set(time.time())
        self.images.labels("describe").inc(images)
        self.images.labels("replay").inc(images * figures["replayed_share"])
        self.images_per_second.set(images / seconds["step"])
        for stage in STAGES:
            self.stage_seconds.labels(stage).observe(seconds.get(stage, 0.0))
        self.loss.set(figures["loss"])
        self.batch_ap.set(figures["batch_mAP"])
        self.learning_rate.set(figures["learning_rate"])
        self.gradient_norm.set(figures["gradient_norm"])
        self.replay_drift.set(figures["replay_drift"])
        self.replayed.set(figures["replayed_share"])
        self.kept.set(figures["kept_share"])
        self.lonely_queries.inc(figures["skipped_queries"])
        if skipped:
            self.nonfinite.labels(skipped).inc()
        self.host_memory.set(host_memory_peak())
        if torch.cuda.is_available():
            self.device_memory.set(torch.cuda.max_memory_allocated())

    def observe_reading(self, traffic: tuple[int, int, int, int], spool_size: int, spool_limit: int) -> None:
        """Take over what reading this rank's share of a step took.

        Args:
            traffic: bytes read, reads tried again, hits and misses of the shard cache.
            spool_size: bytes of the spool file; 0 without one.
            spool_limit: bytes that it could take; 0 without one.
        """
        read_bytes, retries, hits, misses = traffic
        self.read_bytes.inc(read_bytes)
        self.read_retries.inc(retries)
        self.cache_requests.labels("hit").inc(hits)
        self.cache_requests.labels("miss").inc(misses)
        self.spool_size.set(spool_size)
        self.spool_limit.set(spool_limit)

    def observe_evaluation(self, dataset: str, figures: Mapping[str, float]) -> None:
        """A data set was evaluated; its figures by name, from 0 to 1."""
        for name, value in figures.items():
            self.evaluation.labels(dataset, name).set(value)
        if "mAP" in figures:
            self.validation.labels(dataset).set(figures["mAP"])

    def observe_checkpoint(self, step: int, seconds: float, blocked_seconds: float, size: int) -> None:
        """A checkpoint of `size` bytes was written, for `blocked_seconds` of which training waited."""
        self.checkpoint_step.set(step)
        self.stage_seconds.labels("checkpoint").observe(blocked_seconds)
        self.checkpoint_seconds.observe(seconds)
        self.checkpoint_bytes.set(size)
        self.checkpoint_time.set(time.time())


def _utilization(gpu: int | None) -> float:
    """Of a GPU, 0 to 1; NaN without one, or where nothing tells: no nvidia-ml-py, or a slice of a GPU (MIG)."""
    if gpu is None:
        return math.nan
    try:
        return torch.cuda.utilization(gpu) / 100
    except Exception:  # NVML has errors of its own, and none of them may cost the other metrics
        return math.nan


def host_memory_peak() -> int:
    """Greatest resident memory of this process so far, bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
