"""Join descriptors to earlier ones, and take some rows of them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from distap.retrieval.descriptor_files import DescriptorSet, Networks, Texts
from distap.retrieval.row_blocks import TakenRows


def joined_rows(earlier: DescriptorSet, described: DescriptorSet) -> DescriptorSet:
    """Return the record of earlier rows and of those described after them, by which network.

    Its descriptors are none: they stand for the shape alone.
    """
    makers = tuple(dict.fromkeys((*earlier.makers, described.described_by)))
    networks = None
    if len(makers) > 1:
        of_earlier = np.zeros(len(earlier), np.uint16)
        if earlier.networks is not None:
            of_earlier = earlier.networks.of_row
        of_described = np.full(len(described), makers.index(described.described_by), np.uint16)
        networks = Networks(makers, np.concatenate([of_earlier, of_described]))
    keys = np.concatenate([earlier.keys, described.keys])
    left_out = {**earlier.left_out, **described.left_out}
    for key in {*left_out}.intersection(keys.tolist()):  # which the network before could not take
        del left_out[key]
    return replace(
        described,
        descriptors=np.broadcast_to(
            np.zeros(1, np.float32), (len(keys), described.descriptors.shape[1])
        ),
        keys=keys,
        classes=np.concatenate([earlier.classes, described.classes]),
        left_out=left_out,
        networks=networks,
        columns=_joined_columns(earlier, described),
        checksums=np.concatenate([checksums_of(earlier), checksums_of(described)]),
        data=earlier.data,
        added=_places_after(earlier, described.data),
    )


def taken_images(images: DescriptorSet, rows: NDArray[np.int64]) -> DescriptorSet:
    """Return some rows of images, whose descriptors are read when they are taken."""
    networks = images.networks
    return replace(
        images,
        descriptors=TakenRows(images.descriptors, rows),
        keys=images.keys[rows],
        classes=images.classes[rows],
        networks=networks and replace(networks, of_row=networks.of_row[rows]),
        columns={name: texts[rows] for name, texts in images.columns.items()},
        checksums=checksums_of(images)[rows],
    )


def checksums_of(images: DescriptorSet) -> NDArray[np.uint64]:
    """Return (N,) checksums of images, 0 where they are unknown."""
    return np.zeros(len(images), np.uint64) if images.checksums is None else images.checksums


def _joined_columns(first: DescriptorSet, second: DescriptorSet) -> dict[str, Texts]:
    """Return the columns of two sets, one after the other, with "" where one set has none."""
    return {
        name: np.concatenate(
            [images.columns.get(name, np.zeros(len(images), "U1")) for images in (first, second)]
        )
        for name in dict.fromkeys((*first.columns, *second.columns))
    }


def _places_after(images: DescriptorSet, data: str) -> tuple[str, ...]:
    """Return the further places of images, of which `data` is the latest."""
    return (*(place for place in images.added if place != data), *[data] * (data != images.data))
