"""An index together with what describes queries as its images were described."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distap.apps.search.queries import Found, Query
from distap.data.images.decoding import MAX_PIXELS, DamagedImageError
from distap.errors import DistapError
from distap.evaluation.extraction import ImageDescriber, describer_from
from distap.retrieval.descriptor_files import DescribedBy
from distap.retrieval.index_files import Hit, SearchIndex, read_index
from distap.retrieval.whitening import load_whitening
from distap.storage.remotes import RemoteSettings
from distap.training.build import trained_network
from distap.world import World


@dataclass(frozen=True, eq=False)
class Searcher:
    """Finds images of a gallery; several threads may ask at once.

    Args:
        index: of the gallery.
        describer: of images that are searched for; None searches for images of the gallery alone.
        remote: how a remote data set is reached, as the network's recipe says.
    """

    index: SearchIndex
    describer: ImageDescriber | None = None
    remote: RemoteSettings | None = None

    def by_image(self, image: bytes, k: int) -> list[Hit]:
        """The k most similar images of the gallery, best first.

        Args:
            image: a file of FORMATS.
            k: cut to the gallery.
        Raises:
            DamagedImageError: it cannot be decoded or is too large.
            DistapError: there is no network to describe it, or memory does not suffice.
        """
        if self.describer is None:
            raise DistapError("images are described by the network of the index: name its run with --checkpoint")
        return self.index.search(self.describer.describe([image]).numpy(), k)[0]

    def search(self, queries: Sequence[Query], k: int) -> Iterator[Found]:
        """What is found for each query; a file that cannot be used is told.

        Raises:
            DistapError: there is no network to describe images.
        """
        for query in queries:
            if query.key is not None:
                yield Found(query, self.by_key(query.key, k))
                continue
            assert query.file is not None
            try:
                yield Found(query, self.by_image(query.file.read_bytes(), k))
            except DamagedImageError as error:
                yield Found(query, [], str(error))
            except OSError as error:
                yield Found(query, [], f"cannot be read: {error.strerror or error}")

    def by_key(self, key: str, k: int) -> list[Hit]:
        """The k images of the gallery that are most similar to one of them, without itself.

        Raises:
            DistapError: the gallery has no image of this key, or the index cannot give its descriptor.
        """
        row = self.index.row_of(key)
        try:
            descriptor = self.index.descriptor(row)
        except RuntimeError as error:
            raise DistapError(
                f"an index of kind {self.index.about['index']['kind']} cannot give the descriptor of {key!r}: search "
                "by the image itself, or index it as flat"
            ) from error
        # What an index keeps as a code is not of length 1 any more.
        descriptor = descriptor / max(float(np.linalg.norm(descriptor)), np.finfo(np.float32).tiny)
        found = self.index.search(descriptor[None].astype(np.float32), k + 1)[0]
        return [hit for hit in found if hit.row != row][:k]


def open_searcher(
    index: Path,
    checkpoint: Path | str | None = None,
    whitening: Path | None = None,
    *,
    world: World,
    best: bool = False,
    max_pixels: int | Callable[[DescribedBy], int] = MAX_PIXELS,
) -> Searcher:
    """An index on disk with the network that its images were described by.

    Args:
        index: folder that `distap index` wrote.
        checkpoint: a run folder or one of its checkpoints, or the URL of either; None searches for images of the
            gallery alone.
        whitening: what `distap whiten` wrote, where the images were described with one.
        world: whose device describes.
        best: with a run folder: its best checkpoint, not its newest.
        max_pixels: width times height of an image that is refused without decoding when exceeded; or what says it
            by how the gallery was described.
    Raises:
        DistapError: a file is missing or damaged, or the network or whitening is not that of the index.
    """
    opened = read_index(index)
    if checkpoint is None:
        return Searcher(opened)
    maker = opened.described_by
    if maker.whitening is not None and whitening is None:
        raise DistapError(f"{index}: its images were described with a whitening: name its file with --whitening")
    recipe, network = trained_network(checkpoint, world, best)
    describer = describer_from(
        network,
        maker,
        None if whitening is None else load_whitening(whitening),
        max_pixels=max_pixels(maker) if callable(max_pixels) else max_pixels,
        scaled=recipe.data.scaled_decoding,
    )
    opened.require_same_maker(describer.described_by, str(checkpoint))
    return Searcher(opened, describer, recipe.data.remote)
