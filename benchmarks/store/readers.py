"""Readers of a store: distap's ways, WebDataset and MosaicML's streaming.

Each yields chunks of decoded images without end. All crop by the same transform and decode by
distap's decoder, so that they differ in how they read.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import webdataset
from torch import Tensor

from benchmarks.store.options import IMAGES_A_CLASS, StoreOptions
from benchmarks.store.shards import BY_CLASS, MDS, MIXED, Filled, streaming_package
from distap.data.images.augmentation import CropAndVary, CropFlipColour
from distap.data.images.decoding import EncodedImage
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob, TrainingImages
from distap.data.loading.streamed import StreamedSource
from distap.data.sampling.p_by_k import PByKSampling
from distap.stopwatch import Stopwatch
from distap.storage.cache import CacheSettings
from distap.storage.locations import parse_source
from distap.world import World

PREFETCH = 4  # chunks that a worker reads ahead
SHUFFLE_BUFFER = 1000  # images, as WebDataset's examples have it
CROP = 0.5
ONE_BY_ONE = "distap, one by one"
AT_ONCE = "distap, at once"
BY_PLACE = "distap, by place"
WINDOW = "distap, window"
CACHED = "distap, window + cache"
STREAMED = "distap, streamed"
WEBDATASET = "WebDataset"
STREAMING = "MosaicML streaming"


class Place(NamedTuple):
    """Where a reader reads, how many processes it has, and an empty folder of its own."""

    url: str
    workers: int
    folder: Path


Reader = Callable[[Place], Iterator[Tensor]]


def readers(options: StoreOptions, filled: Filled) -> dict[str, Reader | None]:
    """Return the readers by name; None for one that is not installed."""
    transform = CropFlipColour(crop=CROP).transform(options.store_size)

    def indexed(shards: str, window: int | None = None, **settings: Any) -> Reader:
        def read(place: Place) -> Iterator[Tensor]:
            job = loading_job(options, f"{place.url}/{shards}", place.workers, window, **settings)
            return _chunks(IndexedSource().open(job, World(), Stopwatch()), options.chunk)

        return read

    def cached(place: Place) -> Iterator[Tensor]:
        cache = CacheSettings(place.folder / "cache", int(options.cache * filled.shard_bytes))
        return indexed(BY_CLASS, options.window, cache=cache)(place)

    def streamed(place: Place) -> Iterator[Tensor]:
        names = [name.removesuffix(".tar") for name in filled.shards[MIXED]]
        pattern = f"{place.url}/{MIXED}/{{{names[0]}..{names[-1]}}}.tar"
        job = loading_job(options, pattern, place.workers)
        return _chunks(StreamedSource().open(job, World(), Stopwatch()), options.chunk)

    streaming = streaming_package(options.streaming)
    return {
        ONE_BY_ONE: indexed(MIXED, requests=1),
        AT_ONCE: indexed(MIXED),
        BY_PLACE: indexed(BY_CLASS),
        WINDOW: indexed(BY_CLASS, options.window),
        CACHED: cached,
        STREAMED: streamed,
        WEBDATASET: lambda place: _by_webdataset(place, filled, transform, options.chunk),
        STREAMING: streaming
        and (lambda place: _by_streaming(streaming, place, transform, options)),
    }


def loading_job(
    options: StoreOptions, source: str, workers: int, window: int | None = None, **settings: Any
) -> LoadingJob:
    """Return how distap reads batches of P x K images from a source."""
    sampling = PByKSampling(options.batch_classes, IMAGES_A_CLASS, window=window)
    transform = CropFlipColour(crop=CROP).transform(options.store_size)
    return LoadingJob(
        parse_source(source),
        sampling,
        seed=0,
        sizes=((0, options.store_size, transform),),
        chunk=options.chunk,
        workers=workers,
        prefetch=PREFETCH,
        **settings,
    )


def _chunks(images: TrainingImages, chunk: int) -> Iterator[Tensor]:
    for share in images.shares(range(1_000_000)):
        for start in range(0, images.size, chunk):
            yield share.images(slice(start, min(start + chunk, images.size)))


def _by_webdataset(
    place: Place, filled: Filled, transform: CropAndVary, chunk: int
) -> Iterator[Tensor]:
    """Read shards in a random order, through the usual buffer of images in a random order."""
    names = filled.shards[MIXED]
    dataset = (
        webdataset.WebDataset(
            [f"{place.url}/{MIXED}/{name}" for name in names], shardshuffle=len(names)
        )
        .shuffle(SHUFFLE_BUFFER)
        .to_tuple("jpg")
        .map(lambda sample: transform(EncodedImage(sample[0])))
        .repeat()
        .batched(chunk, collation_fn=torch.stack)
    )
    yield from webdataset.WebLoader(
        dataset,
        batch_size=None,
        num_workers=place.workers,
        prefetch_factor=PREFETCH,
        persistent_workers=False,
    )


def _by_streaming(
    streaming: Any, place: Place, transform: CropAndVary, options: StoreOptions
) -> Iterator[Tensor]:
    """Read MDS shards in streaming's own random order, through a cache in the place's folder."""
    # By default it shuffles 262,144 images at a time: all shards of a store as small as this would
    # come before the first images.
    block = options.window * options.images_per_shard

    class Images(streaming.StreamingDataset):
        def __getitem__(self, number: int) -> Tensor:
            return transform(EncodedImage(super().__getitem__(number)["jpg"]))

    os.environ["S3_ENDPOINT_URL"] = place.url
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # any will do
        os.environ.setdefault(name, "store")
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    dataset = Images(
        remote=f"s3://{MDS}/",
        local=str(place.folder / MDS),
        shuffle=True,
        shuffle_block_size=block,
        batch_size=options.chunk,
    )
    for stream in dataset.streams:
        # Forked workers would share the connection that this process fetched the index by, and mix
        # up their answers: shards came out damaged.
        stream._downloader.clean_up()
    loader: Iterable[Tensor] = torch.utils.data.DataLoader(
        dataset, batch_size=options.chunk, num_workers=place.workers, prefetch_factor=PREFETCH
    )
    while True:
        yield from loader
