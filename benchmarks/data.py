"""Images a second of decoding with augmentation and of the loader, beside Pillow, torchvision and
WebDataset.

Every decoder crops the same boxes of the same images, drawn by the same transform from the same
seeds.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
import webdataset
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from typer import Option

from benchmarks import harness
from benchmarks.photos import jpeg, packed, photo
from benchmarks.store.hosts import hosts_report
from benchmarks.store.measuring import store_report
from benchmarks.store.options import StoreOptions
from distap.data.images.augmentation import CropAndVary, CropFlipColour, Transform, seeded
from distap.data.images.boxes import Box, Shape, reduction
from distap.data.images.decoding import EncodedImage
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.share import LoadingJob
from distap.data.sampling import RandomSampling
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.telemetry.terminal import track
from distap.world import World

# images that a worker hands over at once, and chunks that it reads ahead
CHUNK = 16
PREFETCH = 4
IMAGES_A_CLASS = 4
CAPTION = (
    "decode: images that one core decodes and augments. load: all workers of a loader. scale: at"
    " which distap decodes, on average. Pillow, torchvision: full decoding by Pillow, then the same"
    " crop by each. unscaled: distap without scaled decoding. WebDataset: its loader, decoding with"
    " Pillow and cropping with torchvision. faster: how many times distap is, the median over"
    " rounds."
)
HEADINGS = ("what", "format", "pixels", "KB", "to", "scale", "by", "images/s", "faster")


class Format(StrEnum):
    """Of image files, by the ending of their names."""

    jpg = "jpg"
    png = "png"
    webp = "webp"


Rates = dict[str, list[float]]  # images a second by candidate and round; distap's first


class DataBenchmark(StoreOptions):
    """Print images a second of decoding and loading, beside Pillow's full decoding and a plain
    WebDataset loader.

    By default 1-megapixel JPEG, PNG and WebP images for crops of 224, 384 and 800 pixels. With
    --store, of reading shards from a store that answers late, beside WebDataset and MosaicML's
    streaming.
    """

    name: ClassVar[str] = "data"
    image: Annotated[int, Option(help="Width and height of the JPEG images, pixels.", min=32)] = (
        1024
    )
    output_size: Annotated[
        list[int], Option(help="Side that crops are scaled to; repeat for several.")
    ] = [
        224,
        384,
        800,
    ]
    crop: Annotated[
        float, Option(help="Smallest share of an image that a crop keeps.", min=0.01, max=1)
    ] = 0.5
    quality: Annotated[int, Option(help="Quality of JPEG and WebP.", min=1, max=100)] = 90
    format: Annotated[list[Format], Option(help="Format of the images; repeat for several.")] = [
        *Format
    ]
    count: Annotated[int, Option(help="Number of images.", min=32)] = 64
    workers: Annotated[
        int, Option(help="Workers of the loaders; 0 leaves the loaders out.", min=0)
    ] = 2
    rounds: harness.Rounds = 5

    def report(self) -> harness.Report:
        if self.store and self.hosts > 1:
            return hosts_report(self)
        if self.store:
            return store_report(self, self.workers, self.rounds)
        return self._report_of_files()

    def _report_of_files(self) -> harness.Report:
        seeds = track(range(self.count), "drawing photos", self.count)
        photos = [photo(self.image, self.image, seed) for seed in seeds]
        transforms = [CropFlipColour(crop=self.crop).transform(size) for size in self.output_size]
        torch.set_num_threads(1)
        rows = []
        for name in self.format:
            files = [encoded(picture, name, self.quality) for picture in photos]
            for transform in transforms:
                rows.append(
                    self._row("decode", name, transform, files, self._decode(transform, files))
                )
            with tempfile.TemporaryDirectory(prefix="distap-bench-") as folder:
                shards = self._shards(Path(folder), files, name)
                for transform in transforms if self.workers else []:
                    rows.append(
                        self._row(
                            "load", name, transform, files, self._load(transform, shards, name)
                        )
                    )
        cells = [line for row in rows for line in _cells(row)]
        return harness.Report(
            rows, [harness.FiguresTable("images a second", CAPTION, HEADINGS, cells)]
        )

    def _row(
        self,
        description: str,
        name: Format,
        transform: CropAndVary,
        files: Sequence[bytes],
        rates: Rates,
    ) -> harness.Row:
        of_distap = next(iter(rates.values()))
        scales = []
        for seed in range(len(files)):
            torch.manual_seed(seed)
            scales.append(
                1
                / (reduction(*transform.part(self.image, self.image)) if name == Format.jpg else 1)
            )
        return {
            "what": description,
            "format": name,
            "image": self.image,
            "output": transform.size,
            "kilobytes": sum(map(len, files)) / len(files) / 1000,
            "scale": statistics.mean(scales),
            "images_per_second": {
                name: statistics.median(rates_of_turns) for name, rates_of_turns in rates.items()
            },
            "faster": {
                name: harness.median_ratio(of_distap, rates_of_turns)
                for name, rates_of_turns in rates.items()
                if rates_of_turns is not of_distap
            },
        }

    def _decode(self, transform: CropAndVary, files: Sequence[bytes]) -> Rates:
        """Return images a second of a core's time."""

        def decode(opened: Callable[[bytes], Any], changed: Transform) -> None:
            for seed, data in enumerate(files):
                seeded(changed, opened(data), seed)

        decoders = {
            "distap": partial(decode, EncodedImage, transform),
            "Pillow": partial(decode, ByPillow, transform),
            "torchvision": partial(decode, ByTorchvision, transform),
        }
        turns = harness.take_turns(
            decoders, self.rounds, World(), f"decoding to {transform.size} px"
        )
        return {
            name: [len(files) / spent for spent in turn.processor] for name, turn in turns.items()
        }

    def _shards(self, folder: Path, files: Sequence[bytes], name: Format) -> Path:
        """Pack the images into some shards for each worker of WebDataset, which deals out whole
        shards.
        """
        images_per_shard = max(1, len(files) // (4 * max(1, self.workers)))
        return packed(folder, files, name, IMAGES_A_CLASS, images_per_shard=images_per_shard)

    def _load(self, transform: CropAndVary, shards: Path, name: Format) -> Rates:
        rates: Rates = {"distap": [], "WebDataset": []}
        for _ in track(range(self.rounds), f"loading at {transform.size} px", self.rounds):
            rates["distap"].append(self._rate(self._by_distap(transform, shards)))
            rates["WebDataset"].append(self._rate(self._by_webdataset(transform, shards, name)))
        return rates

    def _rate(self, chunks: Iterator[Tensor]) -> float:
        """Return images a second of an endless loader, once its workers have warmed up."""
        for _ in range(self.workers * PREFETCH):
            next(chunks)
        count = -(-self.count // CHUNK)
        started = time.perf_counter()
        for _ in range(count):
            next(chunks)
        return count * CHUNK / (time.perf_counter() - started)

    def _by_distap(self, transform: CropAndVary, shards: Path) -> Iterator[Tensor]:
        batch = self.count // CHUNK * CHUNK
        job = LoadingJob(
            parse_source(shards),
            RandomSampling(batch_size=batch),
            seed=0,
            sizes=((0, transform.size, transform),),
            chunk=CHUNK,
            workers=self.workers,
            prefetch=PREFETCH,
        )
        for share in IndexedSource().open(job, World(), Stopwatch()).shares(range(1_000_000)):
            for start in range(0, batch, CHUNK):
                yield share.images(slice(start, start + CHUNK))

    def _by_webdataset(
        self, transform: CropAndVary, shards: Path, name: Format
    ) -> Iterator[Tensor]:
        dataset = (
            webdataset.WebDataset(sorted(map(str, shards.glob("*.tar"))), shardshuffle=False)
            .to_tuple(name)
            .map(lambda sample: transform(cast(EncodedImage, ByTorchvision(sample[0]))))
            .repeat()
            .batched(CHUNK, collation_fn=torch.stack)
        )
        yield from webdataset.WebLoader(
            dataset,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=PREFETCH,
            persistent_workers=False,
        )


def encoded(picture: Image.Image, name: Format, quality: int) -> bytes:
    """The picture's file, as cameras and web sites write it."""
    if name == Format.jpg:
        return jpeg(picture, quality)
    buffer = io.BytesIO()
    picture.save(buffer, name, quality=quality)
    return buffer.getvalue()


class ByPillow:
    """An image that Pillow decodes in full, crops and scales."""

    def __init__(self, data: bytes) -> None:
        self._image = Image.open(io.BytesIO(data))
        self.size = self._image.size

    def crop(self, box: Box, shape: Shape) -> Tensor:
        resized = self._image.convert("RGB").resize(shape[::-1], Image.Resampling.BILINEAR, box=box)
        pixels: Tensor = F.pil_to_tensor(resized)
        return pixels.contiguous()


class ByTorchvision(ByPillow):
    """An image that Pillow decodes in full, and torchvision crops and scales as a tensor."""

    def crop(self, box: Box, shape: Shape) -> Tensor:
        left, top, right, bottom = box
        whole = F.pil_to_tensor(self._image.convert("RGB"))
        pixels: Tensor = F.resized_crop(
            whole, top, left, bottom - top, right - left, list(shape), antialias=True
        )
        return pixels.contiguous()


def _cells(row: harness.Row) -> Iterator[list[str]]:
    first = [
        row["what"],
        row["format"],
        str(row["image"]),
        f"{row['kilobytes']:.0f}",
        str(row["output"]),
        f"{row['scale']:.2f}",
    ]
    for name, rate in row["images_per_second"].items():
        yield [
            *first,
            name,
            f"{rate:,.0f}",
            f"{row['faster'][name]:.2f}x" if name in row["faster"] else "",
        ]
        first = [""] * len(first)
