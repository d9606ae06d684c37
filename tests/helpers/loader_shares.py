"""Shares of global batches that real loader workers read."""

from images import slot_images

from distap.data.loading.indexed import training_shares
from distap.data.loading.pixels import PixelSettings
from distap.stopwatch import Stopwatch

STEPS = 20


def started(folder, workers=2, steps=STEPS, settings=PixelSettings()):  # noqa: B008 - frozen
    """Shares that loader workers read, and the first of them with its images."""
    images = slot_images(folder)
    shares = training_shares(images, range(6), range(steps), 2, workers, 2, Stopwatch(), pixels=settings)
    share = next(shares)
    share.images(slice(0, 6))
    return shares, share
