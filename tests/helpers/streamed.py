"""Streamed reading for tests: shards as others write them, and what is seen of their images."""

import hashlib
import io

import numpy as np
import webdataset
from images import ALONE, AUGMENTATION
from PIL import Image

from distap.data.loading.share import LoadingJob
from distap.data.loading.streamed import StreamedSource
from distap.data.sampling import RandomSampling
from distap.stopwatch import Stopwatch
from distap.storage.locations import parse_source

SAMPLING = RandomSampling(batch_size=16)
READING = StreamedSource(shuffle=5)
# about three passes
SEED = 3
STEPS = 9
CHUNK = 3


def png(shade):
    buffer = io.BytesIO()
    Image.fromarray(
        np.random.default_rng(shade).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    ).save(buffer, "PNG")
    return buffer.getvalue()


def write_by_webdataset(folder, shards=8, images=6, spoil=()):
    """Shards that others would write, without an index; `spoil` changes members of some samples."""
    folder.mkdir(parents=True)
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"{shard:03d}.tar")) as writer:
            for number in range(images):
                sample = {
                    "__key__": f"{number:02d}",
                    "png": png(100 * shard + number),
                    "cls": (shard + number) % 5,
                }
                sample |= dict(spoil).get((shard, number), {})
                writer.write({key: value for key, value in sample.items() if value is not None})
    return folder


# What decoding finds, what the header tells, and what is not there.
SPOILT = {
    (0, 1): {"png": png(7)[:-600]},
    (1, 2): {"png": b"no image"},
    (2, 5): {"cls": None},
    (6, 0): {"cls": "cat"},
}


def streamed(source, world=ALONE, sampling=SAMPLING, reading=READING, **settings):
    source, transform = parse_source(source), AUGMENTATION.transform(16)
    job = LoadingJob(source, sampling, SEED, ((0, 16, transform),), chunk=CHUNK, **settings)
    return reading.open(job, world, Stopwatch())


def seen(images, steps, count, failures=None):
    """What this rank's `count` rows of each step are: shard and key, class, and the pixels by
    hash."""
    batches = []
    for share in images.shares(steps):
        pixels = [
            p
            for start in range(0, count, CHUNK)
            for p in share.images(slice(start, min(start + CHUNK, count)))
        ]
        digests = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in pixels]
        batches.append(list(zip(share.names, share.labels.tolist(), digests, strict=True)))
        if failures is not None:
            failures += [(name, reason.partition(":")[0]) for name, reason in share.failures]
    return batches
