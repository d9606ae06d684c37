"""Update an index: describe the images that are new or changed, and remove others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distap.apps.search import describer_of
from distap.data.loading.reader import ImageSet, open_images
from distap.data.shards.image_folders import warn_of
from distap.errors import DistapError, logger
from distap.retrieval.changing import changed_index
from distap.retrieval.descriptor_files import DescriptorSet
from distap.retrieval.generations import current_generation, updating
from distap.retrieval.joining import checksums_of
from distap.retrieval.searching import SearchIndex
from distap.retrieval.stored_index import read_index, write_next
from distap.storage.names import composed
from distap.storage.texts import read_text
from distap.telemetry.terminal import track
from distap.world import World, device_of

if TYPE_CHECKING:
    from distap.evaluation.extraction.image_describer import ImageDescriber

NAMED = 3  # images that a message names
Samples = NDArray[np.int64]


@dataclass(frozen=True)
class Changes:
    """Images and keys by what they change in an index."""

    images: ImageSet | None
    row_of: Samples  # (n,) of each image in the index, -1 if it has none
    new: Samples  # numbers of images
    replaced: Samples  # those that the index has with other bytes
    relabelled: Samples  # those that it has with another class or other columns alone
    removed: Samples  # rows of the index

    @property
    def counts(self) -> dict[str, int]:
        names = ("new", "replaced", "relabelled", "removed")
        counts = {name: len(getattr(self, name)) for name in names}
        same = len(self.row_of) - sum(counts[name] for name in names[:3])
        return counts | {"same": same}


@dataclass(frozen=True)
class Network:
    """The trained network of an update, as `open_searcher` takes it."""

    checkpoint: str
    whitening: Path | None = None
    best: bool = False
    trust: bool = False


def update_index(
    folder: Path,
    source: str | None,
    remove: Path | None,
    network: Network | None,
    *,
    replaces: bool = False,
    dry: bool = False,
) -> dict[str, Any]:
    """Write the next generation of an index, and return numbers of images by what became of them.

    Nothing is written if nothing changes, or after an error.

    Args:
        source: images to add, as `distap extract` takes them, or a list of images.
        remove: a file with a key to remove on each line.
        network: what describes images; needed if there are new or changed ones.
        replaces: take over images that the index has with other bytes, class or columns.
        dry: count alone.
    Raises:
        DistapError: a key to remove is unknown, an image is there already with other contents, or
            the network is another one; another update is under way.
    """
    current_generation(folder)  # before a lock makes a folder of a misspelt name
    # Locked from the first read to the switch: a change computed from an older generation would
    # undo what another update has written meanwhile.
    with updating(folder):
        # Into memory, since Faiss cannot change an index that lies in a mapped file.
        index = read_index(folder, changeable=not dry)
        images = None if source is None else open_images(source)
        unread = () if images is None else images.index.left_out  # such as files that are not there
        warn_of(source or "", unread)
        changes = _changes(index, images, _keys_in(remove), folder)
        if not replaces:
            _refuse_other_contents(changes, folder)
        result: dict[str, Any] = {
            **changes.counts,
            "left_out": len(unread),
            "generation": index.generation,
        }
        if dry:
            return result | {"images": len(index)}
        # Everything that can go wrong comes before the first byte is written.
        described = _described(index, changes, network, folder)
        count = len(described or ())
        result["left_out"] += len(changes.new) + len(changes.replaced) - count
        # A damaged image in a list that comes every night is no reason to write all rows anew.
        if not count + len(changes.relabelled) + len(changes.removed):
            return result | {"images": len(index)}
        types = index.columns.types()
        index = _relabelled(index, changes)
        gone = changes.removed
        if described is not None:
            rows = index.rows_of(described.keys.tolist())
            gone = np.concatenate([gone, rows[rows >= 0]])
        written = write_next(folder, changed_index(index, gone, described, track))
        _log_lost_numbers(written, types, folder)
        return result | {"generation": written.generation, "images": len(written)}


def _keys_in(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise DistapError(
            "data.unreadable",
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; expected a text"
            " in UTF-8 with a key on each line",
        ) from error
    return list(dict.fromkeys(composed(line.strip()) for line in lines if line.strip()))


def _changes(
    index: SearchIndex, images: ImageSet | None, removed: Sequence[str], folder: Path
) -> Changes:
    removed_rows = index.rows_of(removed)
    unknown = [key for key, row in zip(removed, removed_rows.tolist(), strict=True) if row < 0]
    if unknown:
        raise DistapError(
            "index.unknown_keys",
            f"{folder}: has no images of {len(unknown):,} of the {len(removed):,} keys to remove,"
            f" such as {', '.join(unknown[:NAMED])}: nothing was changed; take them out",
        )
    removed_rows = np.unique(removed_rows)
    none = np.zeros(0, np.int64)
    if images is None:
        return Changes(None, none, none, none, none, removed_rows)
    row_of = index.rows_of(images.keys.tolist())
    both = np.flatnonzero(np.isin(row_of, removed_rows))
    if len(both):
        raise DistapError(
            "index.added_and_removed",
            f"{folder}: {len(both):,} images are to be added and removed at once, such as"
            f" {_examples(images, both)}: take them out of one of the two",
        )
    present = np.flatnonzero(row_of >= 0)
    before = checksums_of(index.images)[row_of[present]]
    # Without a checksum, as of rows that an earlier distap described, an image counts as changed.
    is_same = (images.checksums(present.tolist()) == before) & (before != 0)
    unchanged = present[is_same]
    return Changes(
        images,
        row_of,
        new=np.flatnonzero(row_of < 0),
        replaced=present[~is_same],
        relabelled=unchanged[_differs(index, images, row_of[unchanged], unchanged)],
        removed=removed_rows,
    )


def _differs(
    index: SearchIndex, images: ImageSet, rows: Samples, samples: Samples
) -> NDArray[np.bool_]:
    """Return whether class or columns of images differ from their rows; no class is no other."""
    classes = images.classes[samples]
    differs: NDArray[np.bool_] = (classes != "") & (classes != index.classes[rows])
    for name, texts in images.index.further.items():
        before = index.images.columns.get(name)
        differs |= texts[samples] != ("" if before is None else before[rows])
    return differs


def _examples(images: ImageSet, samples: Samples) -> str:
    return ", ".join(images.keys[samples[:NAMED]].tolist())


def _refuse_other_contents(changes: Changes, folder: Path) -> None:
    """Raise a DistapError if the index has some images with other contents."""
    for samples, contents in (
        (changes.replaced, "bytes"),
        (changes.relabelled, "class or columns"),
    ):
        if changes.images is not None and len(samples):
            raise DistapError(
                "index.other_contents",
                f"{folder}: has {len(samples):,} of these images with other {contents}, such as"
                f" {_examples(changes.images, samples)}: nothing was changed; --replace takes them"
                " over",
            )


def _described(
    index: SearchIndex, changes: Changes, network: Network | None, folder: Path
) -> DescriptorSet | None:
    """Describe new and changed images, but for those that cannot be read; None without any."""
    from distap.evaluation.extraction.extracting import (
        Describing,
        Extraction,
        extract_descriptors,
    )

    images = changes.images
    wanted = np.union1d(changes.new, changes.replaced)
    if images is None or not len(wanted):
        return None
    if network is None:
        raise DistapError(
            "search.needs_network",
            f"{folder}: {len(wanted):,} images are to be described by the network of the index:"
            " name its run with --checkpoint",
        )
    _log_columns(index, images, folder)
    world = World(device=device_of(0))
    describer: ImageDescriber = describer_of(
        index.makers,
        network.checkpoint,
        network.whitening,
        world=world,
        best=network.best,
        trust=network.trust,
        where=folder,
    )
    describing = Describing(describer, world, shown=True)
    samples, descriptors, reasons = extract_descriptors(Extraction(describing, images, only=wanted))
    for sample, reason in reasons.items():
        logger.warning("%s: left out: %s: %s", images.name, images.keys[sample], reason)
    if not len(samples):
        return None
    before = index.images
    row_of = changes.row_of[samples]
    # What is not said is not taken away: a list that lacks a column, or a folder that has no
    # classes, leaves those of a replaced image as they are.
    classes = images.classes[samples]
    columns = {name: texts[samples] for name, texts in images.index.further.items()}
    columns |= {
        name: np.where(row_of < 0, "", texts[row_of])
        for name, texts in before.columns.items()
        if name not in columns
    }
    return DescriptorSet(
        descriptors,
        images.keys[samples],
        np.where((classes == "") & (row_of >= 0), before.classes[row_of], classes),
        describer.described_by,
        images.name,
        {str(images.keys[sample]): reason for sample, reason in reasons.items()},
        columns=columns,
        checksums=images.checksums(samples.tolist()),
    )


def _log_columns(index: SearchIndex, images: ImageSet, folder: Path) -> None:
    """Log columns that the index or the images lack."""
    of_images = images.index.further.keys()
    of_index = index.images.columns.keys()
    if of_index - of_images and len(index):
        names = ", ".join(sorted(of_index - of_images))
        logger.warning("%s: has no columns %s: they stay empty in new images", images.name, names)
    if of_images - of_index:
        names = ", ".join(sorted(of_images - of_index))
        logger.warning("%s: columns %s are new: they stay empty in earlier images", folder, names)


def _log_lost_numbers(written: SearchIndex, types: dict[str, str], folder: Path) -> None:
    # A price "on request" ends all conditions on numbers, which the server then refuses.
    for name in types:
        if types[name] == "number" and written.columns.type_of(name) == "text":
            logger.warning("%s: the column %s has texts now: <, >, <=, >= fail", folder, name)


def _relabelled(index: SearchIndex, changes: Changes) -> SearchIndex:
    """Return the index with the classes and columns of relabelled images."""
    images = changes.images
    samples = changes.relabelled
    if images is None or not len(samples):
        return index
    rows = changes.row_of[samples]
    before = index.images
    classes = images.classes[samples]
    has_class = classes != ""
    columns = dict(before.columns)
    for name, texts in images.index.further.items():
        columns[name] = _with_cells(
            columns.get(name, np.zeros(len(before), "U1")), rows, texts[samples]
        )
    changed = replace(
        before,
        classes=_with_cells(before.classes, rows[has_class], classes[has_class]),
        columns=columns,
    )
    return replace(index, images=changed)


def _with_cells(texts: NDArray[Any], rows: Samples, cells: NDArray[Any]) -> NDArray[Any]:
    """Return texts of which some are others, wide enough for them."""
    result = texts.astype(np.result_type(texts, cells))
    result[rows] = cells
    return result
