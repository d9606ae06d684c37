"""Thumbnails of a data set's images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distap.data.images.decoding import MAX_PIXELS, DamagedImageError
from distap.data.images.thumbnails import thumbnail
from distap.data.loading.reading import Reader
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.evaluation.saved import SavedEvaluation
from distap.storage.locations import parse_source
from distap.storage.remotes import RemoteSettings

THUMBNAIL = 112  # pixels

Thumbnails = Callable[[int], bytes | None]


class _Thumbnails:
    """JPEG files of images by their number; each is read once, and a damaged one is none."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._made: dict[int, bytes | None] = {}

    def __call__(self, sample: int) -> bytes | None:
        if sample not in self._made:
            self._made[sample] = self._thumbnail(sample)
        return self._made[sample]

    def _thumbnail(self, sample: int) -> bytes | None:
        try:
            image = self._reader.image(sample)
        except DamagedImageError:
            return None
        return thumbnail(image, THUMBNAIL, quality=80)


def thumbnails_of(evaluation: SavedEvaluation, recipe: dict[str, Any]) -> Thumbnails:
    """Thumbnails of the images that were evaluated.

    Args:
        evaluation: of whose data set.
        recipe: of the training; says how a remote data set is reached.
    Raises:
        DistapError: the data set is not there any more, or is another one now.
    """
    data = recipe["data"]
    kept = data.get("validation_index") if evaluation.data == data.get("validation") else None
    remote = RemoteSettings(**data.get("remote", {}))
    source = parse_source(evaluation.data, kept and Path(kept))
    index = load_index(source, remote)
    if index.fingerprint != evaluation.fingerprint:
        raise DistapError(f"{source}: the data set is another one than was evaluated in {evaluation.folder}")
    return _Thumbnails(Reader(source, index, data.get("max_pixels", MAX_PIXELS), remote=remote))
