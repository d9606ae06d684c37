"""Read and write folders of descriptors or indexes: files, keys, and a record of how they were
made.

The record `about.json` names every file with its size and SHA-256, and is written last. So a folder
without it is unfinished, and one whose files are other ones is damaged. Of descriptors it has the
size alone, since hashing would read all of them. Arrays are .npy files, never a pickle.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pydantic.dataclasses
from numpy.typing import NDArray
from pydantic import PositiveInt

from distap.errors import DistapError
from distap.storage.atomic import FileIdentity, file_identity, replacing, write_whole
from distap.storage.names import composed
from distap.storage.texts import read_json

ABOUT_FILE = "about.json"
DESCRIPTORS_FILE = "descriptors.npy"
KEYS_FILE = "keys.npy"
CLASSES_FILE = "classes.npy"
NETWORKS_FILE = "networks.npy"  # of a folder whose rows several networks have described
EXTRACTION_FILE = "extraction.json"  # the plan of the extraction that writes a folder
DESCRIPTORS_VERSION = 3
# of folders with NETWORKS_FILE, which a distap that reads version 3 alone must refuse
NETWORKS_VERSION = 4

SHORT = 12  # letters of a fingerprint that are shown

Texts = NDArray[Any]  # of np.str_; beartype would treat each text length as a type of its own


@contextmanager
def reading(path: Path, command: str) -> Iterator[None]:
    """Turn errors about missing or damaged files into a DistapError.

    Args:
        command: what writes such files, for the message.
    """
    try:
        yield
    except DistapError:
        raise
    except FileNotFoundError as error:
        raise DistapError(
            "descriptors.missing", f"{path}: no such file; `{command}` writes it"
        ) from error
    except Exception as error:  # json, numpy, zipfile, safetensors and Faiss raise a dozen kinds
        raise DistapError(
            "descriptors.damaged", f"{path}: not readable as `{command}` writes it: {error!r}"
        ) from error


@pydantic.dataclasses.dataclass(frozen=True)  # checked, since it is read from JSON
class DescribedBy:
    """A record of how images were turned into descriptors.

    Only those made in the same way can be compared.
    """

    network: str  # hash of its tensors
    sizing: str  # how images were resized, such as `crop 224`, `side 1024` or `original`
    scales: tuple[float, ...] = (1.0,)
    whitening: str | None = None  # hash of the whitening applied after the network, if any
    antialias: bool = True  # of images at scales below 1
    dimensions: PositiveInt | None = None  # first ones that were kept, if not all


@dataclass(frozen=True)
class Networks:
    """Which network has described each of N rows.

    Descriptors of these networks can be compared with each other: `distap extract --only-missing`
    was called for them.
    """

    described_by: tuple[DescribedBy, ...]  # by their first extraction
    of_row: NDArray[np.uint16]  # (N,) place in `described_by`

    def name(self, row: int) -> str:
        """Return the short fingerprint of the network that described a row."""
        return self.described_by[self.of_row[row]].network[:SHORT]


@dataclass(frozen=True)
class DescriptorSet:
    """Descriptors of N images, of length 1, in the order of their data set."""

    descriptors: NDArray[Any]  # (N, C) float32 or float16, possibly a memory map
    keys: Texts  # (N,) unique names
    classes: Texts  # (N,) class names, "" for none
    described_by: DescribedBy  # of several, that of the last extraction
    data: str  # path or URL of the images
    # by name, why an image could not be described
    left_out: Mapping[str, str] = field(default_factory=dict)
    networks: Networks | None = None  # if there are several

    def __len__(self) -> int:
        return len(self.keys)

    def __post_init__(self) -> None:
        if self.descriptors.ndim != 2 or not len(self.descriptors) == len(self.keys) == len(
            self.classes
        ):
            raise DistapError(
                "descriptors.wrong_shape",
                f"{self.data}: descriptors of shape {self.descriptors.shape} for {len(self.keys)}"
                f" keys and {len(self.classes)} classes; expected (N, C), N and N",
            )

    @property
    def makers(self) -> tuple[DescribedBy, ...]:
        """Return how images were described, by each network."""
        return (self.described_by,) if self.networks is None else self.networks.described_by

    def require_one_network(self, purpose: str) -> None:
        if self.networks is not None:
            names = " and ".join(maker.network[:SHORT] for maker in self.makers)
            raise DistapError(
                "descriptors.several_networks",
                f"{self.data}: the networks {names} have described its images, but {purpose}:"
                " extract all images by one network",
            )


def write_described(
    folder: Path,
    descriptors: DescriptorSet,
    files: Mapping[str, Callable[[BinaryIO], Any]],
    **about: Any,
) -> None:
    """Write files with keys and classes of descriptors, and finally their record.

    Earlier contents become invalid as soon as writing starts.

    Args:
        folder: created if missing.
        files: by name, what writes to the opened file.
        about: more entries for the record.
    """
    texts: dict[str, Callable[[BinaryIO], Any]] = {
        KEYS_FILE: partial(np.save, arr=descriptors.keys, allow_pickle=False),
        CLASSES_FILE: partial(np.save, arr=descriptors.classes, allow_pickle=False),
    }
    networks = descriptors.networks
    if networks is not None:
        texts[NETWORKS_FILE] = partial(np.save, arr=networks.of_row, allow_pickle=False)
        about["networks"] = [asdict(maker) for maker in networks.described_by]
    identities: dict[str, dict[str, Any]] = {}
    try:
        (folder / ABOUT_FILE).unlink(missing_ok=True)
        for name, write in {**files, **texts}.items():
            path = folder / name
            with replacing(path) as file:
                write(file)
            if name == DESCRIPTORS_FILE:
                identities[name] = {"bytes": path.stat().st_size}
            else:
                identities[name] = asdict(file_identity(path))
    except (OSError, RuntimeError) as error:  # the latter is Faiss's
        raise DistapError(
            "descriptors.not_written", f"{folder}: {', '.join(files)} cannot be written: {error}"
        ) from error
    record = {
        "version": DESCRIPTORS_VERSION if networks is None else NETWORKS_VERSION,
        "data": descriptors.data,
        "images": len(descriptors),
        "dimensions": descriptors.descriptors.shape[1],
        "dtype": str(descriptors.descriptors.dtype),
        "described_by": asdict(descriptors.described_by),
        "left_out": dict(descriptors.left_out),
        **about,
        "files": identities,
    }
    write_whole(folder / ABOUT_FILE, json.dumps(record, indent=2) + "\n")


def read_described(
    folder: Path, name: str, command: str, remedy: str
) -> tuple[dict[str, Any], DescribedBy, Networks | None, Texts, Texts, tuple[int, int]]:
    """Read a folder of `write_described`: its record, keys (N,) and classes (N,), and the shape N
    and C.

    Args:
        name: another file that must be there, and intact.
    Raises:
        DistapError: a file is missing, or cut, or another one than the record says.
    """
    path = folder / ABOUT_FILE
    if (folder / EXTRACTION_FILE).exists() and not path.exists():
        raise DistapError(
            "descriptors.unfinished",
            f"{folder}: its extraction has not ended; the command that began it continues it",
        )
    with reading(path, command):
        record = read_json(path)
        if record["version"] not in (DESCRIPTORS_VERSION, NETWORKS_VERSION):
            raise DistapError(
                "descriptors.other_version",
                f"{path}: version {record['version']!r}, this distap reads {DESCRIPTORS_VERSION}"
                f" and {NETWORKS_VERSION}; {remedy}",
            )
        # The folder may hold descriptors in place of an index, or an index in place of descriptors.
        if name not in record["files"]:
            raise DistapError(
                "descriptors.other_kind", f"{folder}: has no {name}, which `{command}` writes"
            )
        record |= {"data": str(record["data"]), "left_out": dict(record["left_out"])}
        described_by = DescribedBy(**record["described_by"])
        makers = tuple[DescribedBy, ...]()
        if record["version"] == NETWORKS_VERSION:
            makers = tuple(DescribedBy(**maker) for maker in record["networks"])
        shape = int(record["images"]), int(record["dimensions"])
        # Descriptors are recorded without a hash, and then only their size is compared.
        identities = {
            file: FileIdentity(**{"sha256": "", **record["files"][file]})
            for file in (name, KEYS_FILE, CLASSES_FILE, *[NETWORKS_FILE] * bool(makers))
        }
    for file, identity in identities.items():
        difference = identity.difference(folder / file, ABOUT_FILE)
        if difference:
            raise DistapError("descriptors.damaged", f"{folder / file}: {difference}; {remedy}")
    with reading(folder, command):
        keys = np.load(folder / KEYS_FILE, allow_pickle=False)
        classes = np.load(folder / CLASSES_FILE, allow_pickle=False)
        if not keys.shape == classes.shape == shape[:1]:
            raise ValueError(f"{keys.shape} keys and {classes.shape} classes of {shape[0]} images")
        classes = np.array(list(map(composed, classes.tolist())), dtype=np.str_)
        networks = None
        if makers:
            of_row = np.load(folder / NETWORKS_FILE, allow_pickle=False)
            if of_row.shape != keys.shape or of_row.max(initial=0) >= len(makers):
                raise ValueError(
                    f"{NETWORKS_FILE}: {of_row.shape} numbers up to {of_row.max(initial=0)}, of"
                    f" {len(makers)} networks"
                )
            networks = Networks(makers, of_row)
    return record, described_by, networks, keys, classes, shape


def read_descriptors(folder: Path) -> DescriptorSet:
    """Read a folder of `distap extract`, the descriptors as a memory map.

    Raises:
        DistapError: see `read_described`.
    """
    record, described_by, networks, keys, classes, shape = read_described(
        folder, DESCRIPTORS_FILE, "distap extract", "extract again"
    )
    with reading(folder / DESCRIPTORS_FILE, "distap extract"):
        values = np.lib.format.open_memmap(folder / DESCRIPTORS_FILE, mode="r")
        if (values.shape, str(values.dtype)) != (shape, record["dtype"]):
            raise ValueError(f"{values.dtype} of shape {values.shape}, not as {ABOUT_FILE} says")
    data = record["data"]
    left_out = record["left_out"]
    return DescriptorSet(values, keys, classes, described_by, data, left_out, networks)
