"""Evaluate a network on a data set of shards: extraction over the ranks, then the labelled-set protocol."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distap.data.cache import CacheSettings
from distap.data.index import Index, load_index
from distap.data.loading import NO_SAMPLE, Failure, OrderedImages, evaluation_chunks
from distap.data.locations import Source, parse_source
from distap.data.reading import Reader
from distap.data.storage import RemoteSettings
from distap.data.transforms import evaluation_transform
from distap.distributed import World
from distap.errors import DistapError
from distap.retrieval.extraction import extract
from distap.retrieval.metrics import LabelledSetResult, evaluate_labelled_set
from distap.saved_evaluations import write_evaluation
from distap.telemetry.terminal import track

logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Evaluation:
    """Figures on a data set. Rows of `result` are the samples that could be read, numbered in `samples`."""

    source: Source
    index: Index
    result: LabelledSetResult
    samples: Tensor  # (N,) int64

    def save(self, output: Path, **about: Any) -> Path:
        """Write output/result.json, and beside it what each image scored and retrieved; returns its path.

        Args:
            output: folder, which is made.
            about: what else result.json is to tell, such as the network's checkpoint.
        Raises:
            UnwritableError: it cannot be written.
        """
        result, index, samples = self.result, self.index, self.samples.numpy()
        figures = {
            **about,
            "data": str(self.source),
            "fingerprint": index.fingerprint,
            "images": len(samples),
            "queries": int(result.is_query.sum()),
            "queries_without_positive": result.without_positive,
            "figures": result.summary(),
            "precision_at_recall": result.precision_at_recall.tolist(),
            "classes": self._classes(),
        }
        columns = {
            "sample": samples,
            "key": index.key[samples],
            "label": index.label[samples],
            "average_precision": result.average_precision.numpy(),
            "average_precision_at_r": result.average_precision_at_r.numpy(),
            "first_positive": result.first_positive.numpy(),
            "class_name": index.class_name,
            "neighbour": samples[result.neighbours.numpy()].ravel(),
        }
        return write_evaluation(output, figures, columns)

    def _classes(self) -> dict[str, dict[str, float]]:
        """Figures of each class that has queries, by its name."""
        of_class = self.result.of_classes(torch.from_numpy(self.index.label)[self.samples])
        names = self.index.class_name[of_class.classes.numpy()].tolist()
        rows = zip(
            of_class.queries.tolist(),
            of_class.mean_average_precision.tolist(),
            of_class.mean_average_precision_at_r.tolist(),
            of_class.recall[:, 0].tolist(),
            strict=True,
        )
        columns = ("queries", "mAP", "mAP@R", f"R@{int(self.result.at[0])}")
        return {name: dict(zip(columns, row, strict=True)) for name, row in zip(names, rows, strict=True)}


def evaluate(
    network: nn.Module,
    source: Source | Path | str,
    world: World,
    *,
    image_size: int,
    batch_size: int,
    workers: int,
    max_pixels: int,
    scaled_decoding: bool = True,
    remote: RemoteSettings | None = None,
    cache: CacheSettings | None = None,
    neighbours: int = 10,
    shown: bool = False,
) -> Evaluation:
    """Describe every image of a data set and rank them all for each; every rank gets the result.

    Args:
        network: images to descriptors.
        source: of the shards.
        world: the ranks; each describes its share.
        image_size: width and height that images are scaled and cropped to, pixels.
        batch_size: images described at once.
        workers: processes that read.
        max_pixels: larger images are refused.
        scaled_decoding: whether JPEG is decoded at the scale its crop needs.
        remote: how a remote source is reached.
        cache: where shards are kept on this host's disk.
        neighbours: most similar images to keep of each.
        shown: whether a progress bar is shown.
    """
    source = parse_source(source)
    index = load_index(source, remote)
    if len(index) < world.size:
        raise DistapError(f"{source}: {len(index)} images, fewer than the {world.size} ranks")
    reader = Reader(source, index, max_pixels, remote, cache)
    images = OrderedImages(reader, evaluation_transform(image_size, scaled_decoding), image_size)
    mine = world.slots(len(index))
    failures: list[Failure] = []
    chunks = evaluation_chunks(images, mine, batch_size, workers)
    shown_chunks = track(chunks, f"describing {source}", -(-len(mine) // batch_size)) if shown else chunks

    def described() -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in shown_chunks:
            failures.extend(chunk.failures)
            yield chunk.pixels, torch.tensor([sample != NO_SAMPLE for sample in chunk.samples])

    descriptors, present = extract(network, described(), world, len(index))
    for failure in failures:
        logger.warning("left out of the evaluation: %s of %s: %s", failure.where, source, failure.reason)
    labels = torch.from_numpy(index.label).to(descriptors.device)
    result = evaluate_labelled_set(descriptors[present], labels[present], neighbours)
    on_cpu = LabelledSetResult(*(getattr(result, name).cpu() for name in LabelledSetResult.__dataclass_fields__))
    return Evaluation(source, index, on_cpu, present.nonzero().flatten().cpu())


def refuse_seen_classes(train: Index, validation: Index, source: Source) -> None:
    """Raise a DistapError where a class of the validation set is trained on."""
    seen = sorted(set(train.class_name.tolist()) & set(validation.class_name.tolist()))
    if seen:
        raise DistapError(
            f"data.validation: {source} shares {len(seen)} classes with the training set "
            f"({', '.join(seen[:3])}, ...), so its figures would not "
            "be of unseen classes; set data.unseen_classes=false if that is meant"
        )
