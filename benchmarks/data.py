"""Images a second of decoding with augmentation and of the loader, beside Pillow, torchvision and WebDataset.

What is compared takes turns in one run, so that a noisy machine is noisy for all of it: decoders image by image,
timed by what they take of a core, loaders round by round. Every decoder crops the same boxes of the same images,
drawn by the same transform from the same seeds.
"""

import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import webdataset
from PIL import Image
from rich.table import Table
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from benchmarks.photos import jpeg, photo
from distap.data.images.augmentation import CropAndVary, CropFlipColour, Croppable, Transform, seeded
from distap.data.images.decoding import Box, EncodedImage, reduction
from distap.data.loading.indexed import IndexedSource
from distap.data.loading.training import LoadingJob
from distap.data.sampling.random import RandomSampling
from distap.data.settings import PixelSettings
from distap.data.shards.packing import pack
from distap.data.shards.parallel import Track, untracked
from distap.pages.page import write_page
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source
from distap.telemetry.terminal import text_table
from distap.world import World

CHUNK, PREFETCH = 16, 4  # images that a worker hands over at once, and chunks it reads ahead
IMAGES_A_CLASS = 4


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        image: width and height of the JPEG images, pixels.
        outputs: widths and heights that crops are scaled to, pixels.
        crop: smallest share of the image's area that a random crop keeps.
        quality: of the JPEG images.
        count: images.
        workers: of the loaders; 0 leaves the loaders out.
        rounds: times that each is done.
    """

    image: int
    outputs: tuple[int, ...]
    crop: float
    quality: int
    count: int
    workers: int
    rounds: int


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds for one size of the output.

    Args:
        what: `decode`, on one core, or `load`, with all workers.
        image, output: widths, pixels.
        kilobytes: of a JPEG image, on average.
        scale: at which it is decoded, on average: 0.5 is half the width.
        images_per_second: by candidate.
        faster: how many times distap does what each other candidate does, by candidate; of one round each.
    """

    what: str
    image: int
    output: int
    kilobytes: float
    scale: float
    images_per_second: dict[str, float]
    faster: dict[str, float]


def measure(setting: Setting, track: Track = untracked) -> Iterator[Figures]:
    """Measure decoding, then the loaders, for every size of the output."""
    seeds = track(range(setting.count), "drawing photos", setting.count)
    files = [jpeg(photo(setting.image, setting.image, seed), setting.quality) for seed in seeds]
    for output in setting.outputs:
        transform = CropFlipColour(crop=setting.crop).transform(output)
        with _one_thread():
            turns = track(range(setting.rounds), f"decoding to {output} px", setting.rounds)
            rounds = [_decoding_round(transform, files) for _ in turns]
        yield _figures("decode", setting, transform, files, rounds)
    if not setting.workers:
        return
    with tempfile.TemporaryDirectory(prefix="distap-bench-") as folder:
        shards = _shards(Path(folder), files, setting.workers)
        for output in setting.outputs:
            transform = CropFlipColour(crop=setting.crop).transform(output)
            turns = track(range(setting.rounds), f"loading at {output} px", setting.rounds)
            rounds = [_loading_round(setting, transform, shards) for _ in turns]
            yield _figures("load", setting, transform, files, rounds)


def _figures(
    what: str, setting: Setting, transform: CropAndVary, files: Sequence[bytes], rounds: Sequence[dict[str, float]]
) -> Figures:
    """From every candidate's images a second in each round; distap comes first."""
    own, *others = rounds[0]
    boxes = []
    for seed in range(len(files)):
        torch.manual_seed(seed)
        boxes.append(transform.choose(setting.image, setting.image))
    return Figures(
        what,
        setting.image,
        transform.size,
        sum(map(len, files)) / len(files) / 1000,
        statistics.mean(1 / reduction(box, transform.size) for box in boxes),
        {name: statistics.median(rates[name] for rates in rounds) for name in rounds[0]},
        {name: statistics.median(rates[own] / rates[name] for rates in rounds) for name in others},
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class ByPillow:
    """An image that Pillow decodes in full, crops and scales."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        self.size = image.size

    def crop(self, box: Box, size: int, scaled: bool) -> Tensor:
        """(3, size, size) uint8."""
        resized = self._image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
        pixels: Tensor = F.pil_to_tensor(resized)
        return pixels.contiguous()


class ByTorchvision(ByPillow):
    """An image that Pillow decodes in full, and torchvision crops and scales as a tensor."""

    def crop(self, box: Box, size: int, scaled: bool) -> Tensor:
        """(3, size, size) uint8."""
        left, top, right, bottom = box
        whole = F.pil_to_tensor(self._image.convert("RGB"))
        pixels: Tensor = F.resized_crop(whole, top, left, bottom - top, right - left, [size, size], antialias=True)
        return pixels.contiguous()


def _decoding_round(transform: CropAndVary, files: Sequence[bytes]) -> dict[str, float]:
    """Images a second of a core's time, by decoder."""
    decoders: dict[str, tuple[Callable[[bytes], Croppable], Transform]] = {
        "distap": (EncodedImage, transform),
        "Pillow": (lambda data: ByPillow(Image.open(io.BytesIO(data))), transform),
        "torchvision": (lambda data: ByTorchvision(Image.open(io.BytesIO(data))), transform),
        "unscaled": (EncodedImage, replace(transform, scaled=False)),
    }
    seconds = dict.fromkeys(decoders, 0.0)
    for seed, data in enumerate(files):
        for name, (opened, changed) in decoders.items():
            started = time.thread_time()
            seeded(changed, opened(data), seed)
            seconds[name] += time.thread_time() - started
    return {name: len(files) / spent for name, spent in seconds.items()}


def _shards(folder: Path, files: Sequence[bytes], workers: int) -> Path:
    """The images as shards, some for each worker of WebDataset, which deals out whole shards."""
    images = folder / "images"
    for number, data in enumerate(files):
        path = images / str(number // IMAGES_A_CLASS) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    pack(images, folder / "shards", images_per_shard=max(1, len(files) // (4 * workers)))
    return folder / "shards"


def _loading_round(setting: Setting, transform: CropAndVary, shards: Path) -> dict[str, float]:
    """Images a second, by loader."""
    return {
        "distap": _rate(_by_distap(setting, transform, shards), setting),
        "WebDataset": _rate(_by_webdataset(setting, transform, shards), setting),
    }


def _rate(chunks: Iterator[Tensor], setting: Setting) -> float:
    """Images a second of an endless loader, once its workers have warmed up."""
    for _ in range(setting.workers * PREFETCH):
        next(chunks)
    count = -(-setting.count // CHUNK)
    started = time.perf_counter()
    for _ in range(count):
        next(chunks)
    return count * CHUNK / (time.perf_counter() - started)


def _by_distap(setting: Setting, transform: CropAndVary, shards: Path) -> Iterator[Tensor]:
    batch = setting.count // CHUNK * CHUNK
    sampling = RandomSampling(batch_size=batch)
    job = LoadingJob(
        parse_source(shards),
        sampling,
        seed=0,
        transform=transform,
        image_size=transform.size,
        chunk=CHUNK,
        workers=setting.workers,
        prefetch=PREFETCH,
        pixels=PixelSettings(hold="memory"),
    )
    for share in IndexedSource().open(job, World(), Stopwatch()).shares(range(1_000_000)):
        for start in range(0, batch, CHUNK):
            yield share.images(slice(start, start + CHUNK))


def _by_webdataset(setting: Setting, transform: CropAndVary, shards: Path) -> Iterator[Tensor]:
    urls = sorted(map(str, shards.glob("*.tar")))
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=False)
        .decode("pil")
        .to_tuple("jpg")
        .map(lambda sample: transform(ByTorchvision(sample[0])))
        .repeat()
        .batched(CHUNK, collation_fn=torch.stack)
    )
    loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=setting.workers, prefetch_factor=PREFETCH, persistent_workers=False
    )
    yield from loader


def table(figures: Sequence[Figures]) -> Table:
    """The figures for the terminal."""
    rows = (cells for row in figures for cells in _rows(row))
    return text_table("images a second", CAPTION, HEADINGS, rows)


CAPTION = (
    "decode: images that one core decodes and augments. load: all workers of a loader. scale: at which distap "
    "decodes, on average. Pillow, torchvision: full decoding by Pillow, then the same crop by each. unscaled: "
    "distap without scaled decoding. WebDataset: its loader, decoding with Pillow and cropping with torchvision. "
    "faster: how many times distap is, the median over rounds."
)
HEADINGS = ("what", "pixels", "KB", "to", "scale", "by", "images/s", "faster")


def _rows(row: Figures) -> Iterator[tuple[str, ...]]:
    first: tuple[str, ...] = (row.what, str(row.image), f"{row.kilobytes:.0f}", str(row.output), f"{row.scale:.2f}")
    for name, rate in row.images_per_second.items():
        faster = f"{row.faster[name]:.2f}x" if name in row.faster else ""
        yield (*first, name, f"{rate:,.0f}", faster)
        first = ("",) * len(first)


def write_results(folder: Path, figures: Sequence[Figures], facts: str) -> Path:
    """Write data.json and data.html, the table as a page; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps([asdict(row) for row in figures], indent=1) + "\n")
    page = folder / "data.html"
    rows = [cells for row in figures for cells in _rows(row)]
    title, note = "Decoding and loading images", f"{facts}. {CAPTION}"
    write_page(page, "measurements.html", title=title, note=note, sections={}, heading=HEADINGS, rows=rows)
    return page
