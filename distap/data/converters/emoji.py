"""The emoji retrieval set: one class an emoji, one image a vendor, from the npm registry.

Nine open emoji sets are fetched as npm packages and drawn to PNG. An emoji that at least five vendors draw is
a class. As in Stanford Online Products, the first half of the classes (by name) trains and the rest tests.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distap.data.shards.progress import Track, untracked
from distap.errors import DistapError
from distap.storage.atomic import write_whole

VENDORS = {
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "twemoji": "1.2.5",
    "openmoji": "1.2.29",
    "fluent-emoji": "1.2.7",
    "fluent-emoji-flat": "1.2.6",
    "emojione": "1.2.3",
    "emojione-v1": "1.2.3",
    "fxemoji": "1.2.2",
}
MIN_VENDORS = 5
TRAIN_CLASSES = 795
COMPLETE = "emoji.json"  # written last: its presence says that every image is there


@dataclass(frozen=True)
class Vendor:
    """One vendor's drawings: its name, its licence and the SVG text of each icon."""

    name: str
    licence: str
    drawings: dict[str, str]


def fetch(output: Path, size: int = 128, track: Track = untracked) -> dict[str, Any]:
    """Fetch and draw the set into output/{train,test}/CLASS/VENDOR.png; what is drawn already is kept.

    Args:
        output: folder of the images, made if need be.
        size: width and height of the images, pixels.
        track: wraps a loop to show its progress.
    Returns:
        The contents of output/emoji.json: versions, licences, counts of classes and images.
    Raises:
        DistapError: npm or the renderer is missing, a download fails, or a package has another version.
    """
    done = output / COMPLETE
    if done.exists():
        record: dict[str, Any] = json.loads(done.read_text())
        if record["size"] != size:
            raise DistapError(
                f"{output} holds the emoji set at {record['size']} px, not {size}: choose another folder"
            )
        return record
    require_renderer()
    with tempfile.TemporaryDirectory() as folder:
        vendors = list(track(download(VENDORS, Path(folder)), "fetching", len(VENDORS)))
    classes = shared_icons([set(vendor.drawings) for vendor in vendors])
    train, test = split(classes)
    jobs = [
        (vendor.drawings[name], size, output / part / name / f"{vendor.name}.png")
        for part, names in (("train", train), ("test", test))
        for name in names
        for vendor in vendors
        if name in vendor.drawings
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for _ in track(pool.map(draw, jobs, chunksize=32), "drawing", len(jobs)):
            pass
    record = {
        "size": size,
        "classes": {"train": len(train), "test": len(test)},
        "images": len(jobs),
        "vendors": {v.name: {"version": VENDORS[v.name], "licence": v.licence} for v in vendors},
    }
    done.write_text(json.dumps(record, indent=2) + "\n")
    return record


def shared_icons(vendors: list[set[str]]) -> list[str]:
    """Names, sorted, of the icons that at least five vendors draw, skin-tone variants left out."""
    names = {name for icons in vendors for name in icons if "skin-tone" not in name}
    return sorted(name for name in names if sum(name in icons for icons in vendors) >= MIN_VENDORS)


def split(classes: list[str]) -> tuple[list[str], list[str]]:
    """Training and test classes: the first 795 names and the rest, so that no test class is ever trained on."""
    names = sorted(classes)
    return names[:TRAIN_CLASSES], names[TRAIN_CLASSES:]


def download(vendors: dict[str, str], folder: Path) -> Iterator[Vendor]:
    """Fetch each vendor's npm package into `folder` and read its drawings."""
    npm = shutil.which("npm")
    if npm is None:
        raise DistapError(
            "npm was not found on the PATH: the emoji set comes from the npm registry; install Node.js with npm"
        )
    for name, version in vendors.items():
        package = f"@iconify-json/{name}@{version}"
        command = [npm, "pack", "--silent", "--pack-destination", str(folder), package]
        result = subprocess.run(command, capture_output=True, text=True)
        archive = folder / f"iconify-json-{name}-{version}.tgz"
        if result.returncode != 0 or not archive.exists():
            raise DistapError(f"npm could not fetch {package}: {(result.stderr or result.stdout).strip()}")
        yield read_vendor(archive, name, version)


def read_vendor(archive: Path, name: str, version: str) -> Vendor:
    """Drawings of one npm package; its version is checked against what was asked for."""
    with tarfile.open(archive) as tar:

        def member(path: str) -> dict[str, Any]:
            file = tar.extractfile(f"package/{path}")
            assert file is not None
            return dict(json.load(file))

        try:
            found, icons, info = member("package.json")["version"], member("icons.json"), member("info.json")
        except (KeyError, json.JSONDecodeError) as error:
            raise DistapError(f"{archive.name} is not an icon package of iconify: {error}") from error
    if found != version:
        raise DistapError(f"{archive.name} holds version {found} of {name}, expected {version}")
    drawings = {icon: svg(entry, icons) for icon, entry in icons["icons"].items()}
    return Vendor(name, info["license"]["spdx"], drawings)


def svg(icon: dict[str, Any], package: dict[str, Any]) -> str:
    """A whole SVG document from an icon's body; its view box falls back to the package's."""

    def number(key: str, default: int) -> Any:
        return icon.get(key, package.get(key, default))

    box = f"{number('left', 0)} {number('top', 0)} {number('width', 16)} {number('height', 16)}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{box}">{icon["body"]}</svg>'
    )


def require_renderer() -> None:
    """Say how to install the SVG renderer where it is missing."""
    if find_spec("resvg_py") is None:
        raise DistapError("the emoji set is drawn by resvg-py, which is missing: pip install 'distap[emoji]'")


def draw(job: tuple[str, int, Path]) -> None:
    """Draw one SVG on white to a PNG file, whole or not at all; a file that is there is kept."""
    import resvg_py

    drawing, size, path = job
    if path.exists():
        return
    png = resvg_py.svg_to_bytes(
        svg_string=drawing, width=size, height=size, background="#ffffff", skip_system_fonts=True
    )
    write_whole(path, png)
