"""Read and write folders of descriptors or indexes: files, keys, and a record of how they were
made.

The record `about.json` names every file with its size and SHA-256, and is written last. So a folder
without it is unfinished, and one whose files are other ones is damaged. Of descriptors it has the
size alone, since hashing would read all of them. Arrays are .npy files, never a pickle.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
CHECKSUMS_FILE = "checksums.npy"
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

    def __post_init__(self) -> None:
        highest = self.of_row.max(initial=0)
        if highest >= len(self.described_by):
            raise ValueError(f"a number {highest} of {len(self.described_by)} networks")

    def name(self, row: int) -> str:
        """Return the short fingerprint of the network that described a row."""
        return self.described_by[self.of_row[row]].network[:SHORT]


@dataclass(frozen=True)
class DescriptorSet:
    """Descriptors of N images, of length 1, in the order of their data set."""

    descriptors: Any  # (N, C) float32 or float16, such as a memory map
    keys: Texts  # (N,) unique names
    classes: Texts  # (N,) class names, "" for none
    described_by: DescribedBy  # of several, that of the last extraction
    data: str  # path or URL of the images
    # by name, why an image could not be described
    left_out: Mapping[str, str] = field(default_factory=dict)
    networks: Networks | None = None  # if there are several
    # columns of the list of images, by name: (N,) texts, "" for none
    columns: Mapping[str, Texts] = field(default_factory=dict)
    # (N,) uint64 of each image's bytes: CRC-32 and, in the lower half, their number; 0 is unknown
    checksums: NDArray[np.uint64] | None = None
    added: tuple[str, ...] = ()  # further places of images, the latest last

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
    def sources(self) -> tuple[str, ...]:
        """Return paths or URLs of the images, the latest last."""
        return (self.data, *self.added)

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
    hashed: bool = False,
    **about: Any,
) -> None:
    """Write files with keys and classes of descriptors, and finally their record.

    Earlier contents become invalid as soon as writing starts.

    Args:
        folder: created if missing.
        files: by name, what writes to the opened file.
        hashed: record the SHA-256 of the descriptors too.
        about: more entries for the record.
    """
    arrays: dict[str, NDArray[Any]] = {
        KEYS_FILE: descriptors.keys,
        CLASSES_FILE: descriptors.classes,
        **dict(zip(_column_files(descriptors.columns), descriptors.columns.values(), strict=True)),
    }
    networks = descriptors.networks
    if networks is not None:
        arrays[NETWORKS_FILE] = networks.of_row
        about["networks"] = [asdict(maker) for maker in networks.described_by]
    if descriptors.checksums is not None:
        arrays[CHECKSUMS_FILE] = descriptors.checksums
    texts: dict[str, Callable[[BinaryIO], Any]] = {
        name: partial(np.save, arr=array, allow_pickle=False) for name, array in arrays.items()
    }
    identities: dict[str, dict[str, Any]] = {}
    try:
        (folder / ABOUT_FILE).unlink(missing_ok=True)
        for name, write in {**files, **texts}.items():
            path = folder / name
            with replacing(path) as file:
                write(file)
            if name == DESCRIPTORS_FILE and not hashed:
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
        "columns": list(descriptors.columns),
        "added": list(descriptors.added),
        **about,
        "files": identities,
    }
    write_whole(folder / ABOUT_FILE, json.dumps(record, indent=2) + "\n")


def _column_files(columns: Collection[str]) -> list[str]:
    """Return names of files: a column may be called anything."""
    return [f"column-{number}.npy" for number in range(len(columns))]


def read_descriptors(folder: Path) -> DescriptorSet:
    """Read a folder of `distap extract`, the descriptors as a memory map.

    Raises:
        DistapError: see `read_described`.
    """
    return read_described(folder, "distap extract", "extract again")[0]


def _require_readable(path: Path, record: Mapping[str, Any], command: str, remedy: str) -> None:
    if record["version"] not in (DESCRIPTORS_VERSION, NETWORKS_VERSION):
        raise DistapError(
            "descriptors.other_version",
            f"{path}: version {record['version']!r}, this distap reads {DESCRIPTORS_VERSION}"
            f" and {NETWORKS_VERSION}; {remedy}",
        )
    # The folder may hold an index of an earlier distap.
    if DESCRIPTORS_FILE not in record["files"]:
        raise DistapError(
            "descriptors.other_kind",
            f"{path.parent}: has no {DESCRIPTORS_FILE}, which `{command}` writes",
        )


def read_described(
    folder: Path, command: str, remedy: str, files: Sequence[str] = (), hashed: bool = False
) -> tuple[DescriptorSet, dict[str, Any]]:
    """Read a folder of `write_described`: its images, with mapped descriptors, and its record.

    Args:
        files: others that must be intact if the record names them.
        hashed: read all descriptors to compare their SHA-256.
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
        _require_readable(path, record, command, remedy)
        described_by = DescribedBy(**record["described_by"])
        makers = tuple[DescribedBy, ...]()
        if record["version"] == NETWORKS_VERSION:
            makers = tuple(DescribedBy(**maker) for maker in record["networks"])
        shape = int(record["images"]), int(record["dimensions"])
        columns = list(map(str, record.get("columns", ())))
        names = [DESCRIPTORS_FILE, KEYS_FILE, CLASSES_FILE, *_column_files(columns)]
        names += [NETWORKS_FILE] * bool(makers)
        names += [name for name in (CHECKSUMS_FILE, *files) if name in record["files"]]
        # Descriptors are compared by their size alone, since a hash would read all of them.
        unread = {} if hashed else {DESCRIPTORS_FILE: {"sha256": ""}}
        identities = {
            name: FileIdentity(**{"sha256": "", **record["files"][name], **unread.get(name, {})})
            for name in names
        }
    for name, identity in identities.items():
        difference = identity.difference(folder / name, ABOUT_FILE)
        if difference:
            raise DistapError("descriptors.damaged", f"{folder / name}: {difference}; {remedy}")

    def read(name: str, dtype: str, read_shape: tuple[int, ...] = shape[:1]) -> NDArray[Any]:
        with reading(folder / name, command):
            values = np.lib.format.open_memmap(folder / name, mode="r")
            right = values.dtype.kind == "U" if dtype == "str" else str(values.dtype) == dtype
            if values.shape != read_shape or not right:
                raise ValueError(
                    f"{values.dtype} of shape {values.shape}, not as {ABOUT_FILE} says"
                )
            return values

    with reading(folder, command):
        networks = Networks(makers, read(NETWORKS_FILE, "uint16")) if makers else None
        classes = list(map(composed, read(CLASSES_FILE, "str").tolist()))
        images = DescriptorSet(
            descriptors=read(DESCRIPTORS_FILE, record["dtype"], shape),
            keys=read(KEYS_FILE, "str"),
            classes=np.array(classes, dtype=np.str_),
            described_by=described_by,
            data=str(record["data"]),
            left_out=dict(record["left_out"]),
            networks=networks,
            columns={
                name: read(file, "str")
                for name, file in zip(columns, _column_files(columns), strict=True)
            },
            checksums=read(CHECKSUMS_FILE, "uint64") if CHECKSUMS_FILE in names else None,
            added=tuple(map(str, record.get("added", ()))),
        )
    return images, record
