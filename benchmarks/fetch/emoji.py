"""Fetch the emoji retrieval set: nine open emoji sets from the npm registry, drawn to PNG.

A class is an emoji that at least five vendors draw, with an image by each. As in Stanford Online
Products, the first half of the classes (by name) trains and the rest tests.
"""

import json
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fetch.rendered_sets import (
    fetch_packages,
    finish,
    finished,
    is_drawn,
    require_sha512,
    write_image,
    write_lists,
)
from distap.data.shards.parallel import Track, map_in_processes, untracked, usable_cores
from distap.errors import DistapError

VENDORS = {  # version of each npm package, and its SHA-512 in base64
    "noto": (
        "1.2.9",
        "DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
    ),
    "noto-v1": (
        "1.2.5",
        "/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
    ),
    "twemoji": (
        "1.2.5",
        "uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
    ),
    "openmoji": (
        "1.2.29",
        "vXdhkqcXVSO6suy+m9LbcUM3OdVyuNOtpV8/als/WqfkQIRxevL5Geb/g+6GH/Qwnq1OqksEmaDGTCmZ5nFKJQ==",
    ),
    "fluent-emoji": (
        "1.2.7",
        "D8G6bKAyIsyxP1rzZtIWr/gg/fO4Rg1+DyCWlfqKK4h8W+4Em/Y0P6QYgJUQTlUcagzJvSyg+9OBv4hz4Hc/QA==",
    ),
    "fluent-emoji-flat": (
        "1.2.6",
        "RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
    ),
    "emojione": (
        "1.2.3",
        "T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
    ),
    "emojione-v1": (
        "1.2.3",
        "UjI2VQEXVtGlPBvQuxEizro7QCgBcJDOYwKUupquvvZ8UV4xOlvm45IU82JYWegiAWLerY79gFLMZ26U6Ms+ww==",
    ),
    "fxemoji": (
        "1.2.2",
        "UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
    ),
}
# Unicode's groups and subgroups of emoji, in JSON by emojibase (MIT licence).
EMOJIBASE = (
    "17.0.0",
    "Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
)
MIN_VENDORS = 5
TRAIN_CLASSES = 795
COMPLETE = "emoji.json"  # written last: if it is there, so is every image
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'viewBox="{left} {top} {width} {height}">{body}</svg>'
)


class Vendor(NamedTuple):
    name: str
    licence: str
    drawings: dict[str, str]  # SVG text by the name of the icon


def fetch_emoji(output: Path, size: int = 128, track: Track = untracked) -> dict[str, Any]:
    """Fetch and draw the set into output/{train,test}/CLASS/VENDOR.png.

    Images that are there already are kept.

    Images have `size` x `size` pixels. The lists output/{train,test}.csv name each image's class,
    its subgroup of Unicode (level1) and its group (level2). Returns the contents of
    output/emoji.json: versions, licences and counts.
    """
    found = finished(output / COMPLETE, size)
    if found:
        return found
    if find_spec("resvg_py") is None:
        raise DistapError(
            "package.missing",
            "the emoji set is drawn by resvg-py, which is missing: pip install 'distap[emoji]'",
        )
    with tempfile.TemporaryDirectory() as folder:
        vendors = download(VENDORS, Path(folder), track)
        (tree,) = fetch_packages([f"emojibase-data@{EMOJIBASE[0]}"], Path(folder), track)
        require_sha512(tree, EMOJIBASE[1])
        levels = read_levels(
            tree, (Path(folder) / f"iconify-json-{name}-{VENDORS[name][0]}.tgz" for name in VENDORS)
        )
    names = shared_icons([set(vendor.drawings) for vendor in vendors])
    jobs = [
        (vendor.drawings[name], size, output / part_of_set / name / f"{vendor.name}.png")
        for part_of_set, classes in (
            ("train", names[:TRAIN_CLASSES]),
            ("test", names[TRAIN_CLASSES:]),
        )
        for name in classes
        for vendor in vendors
        if name in vendor.drawings
    ]
    map_in_processes(draw, jobs, usable_cores(), "drawing", track)
    write_lists(output, (path for *_, path in jobs), levels)
    train = min(TRAIN_CLASSES, len(names))
    record = {
        "size": size,
        "classes": {"train": train, "test": len(names) - train},
        "images": len(jobs),
        "vendors": {v.name: {"version": VENDORS[v.name][0], "licence": v.licence} for v in vendors},
    }
    return finish(output / COMPLETE, record)


def shared_icons(vendors: list[set[str]]) -> list[str]:
    """Return the sorted names of the icons that at least five vendors draw, without skin-tone
    variants.
    """
    counts = Counter(chain.from_iterable(vendors))
    return sorted(
        name for name, count in counts.items() if count >= MIN_VENDORS and "skin-tone" not in name
    )


def download(
    vendors: dict[str, tuple[str, str]], folder: Path, track: Track = untracked
) -> list[Vendor]:
    """Fetch each vendor's npm package into `folder` and read its drawings."""
    packages = [f"@iconify-json/{name}@{version}" for name, (version, _) in vendors.items()]
    archives = dict(zip(vendors, fetch_packages(packages, folder, track), strict=True))
    for name, archive in archives.items():
        require_sha512(archive, vendors[name][1])
    return [read_vendor(archives[name], name, version) for name, (version, _) in vendors.items()]


def read_vendor(archive: Path, name: str, version: str) -> Vendor:
    """Read the drawings of one npm package, and compare its version with the expected one."""
    try:
        with tarfile.open(archive) as tar:
            files = [
                tar.extractfile(f"package/{name}.json") for name in ("package", "icons", "info")
            ]
            manifest, package, info = (dict(json.load(file)) for file in files if file)
        found = manifest["version"]
    except (KeyError, ValueError) as error:
        raise DistapError(
            "data.wrong_archive", f"{archive.name} is not an icon package of iconify: {error}"
        ) from error
    if found != version:
        raise DistapError(
            "data.wrong_archive",
            f"{archive.name} holds version {found} of {name}, expected {version}",
        )
    box = {"left": 0, "top": 0, "width": 16, "height": 16}
    drawings = {
        icon: SVG.format_map({**box, **package, **entry})
        for icon, entry in package["icons"].items()
    }
    return Vendor(name, info["license"]["spdx"], drawings)


def read_levels(tree: Path, vendors: Iterable[Path]) -> dict[str, tuple[str, str]]:
    """Return Unicode's subgroup and group of each icon, from the archives of emojibase and of the
    vendors.

    Vendors name the characters of their icons; icons whose characters Unicode does not list have no
    levels.
    """
    with tarfile.open(tree) as tar:
        files = [tar.extractfile(f"package/{name}.json") for name in ("en/data", "meta/groups")]
        listed, meta = (json.load(file) for file in files if file)
    of_characters = {
        plain(entry["hexcode"]): (
            meta["subgroups"][str(entry["subgroup"])],
            meta["groups"][str(entry["group"])],
        )
        for entry in listed
        if "subgroup" in entry
    }
    levels: dict[str, tuple[str, str]] = {}
    for archive in vendors:
        with tarfile.open(archive) as tar:
            if "package/chars.json" in tar.getnames() and (
                file := tar.extractfile("package/chars.json")
            ):
                for characters, name in json.load(file).items():
                    if plain(characters) in of_characters:
                        levels.setdefault(name, of_characters[plain(characters)])
    return levels


def plain(characters: str) -> str:
    """Return hexadecimal characters without those that choose a picture, which not every vendor
    writes.
    """
    return "-".join(code for code in characters.lower().split("-") if code != "fe0f")


def draw(job: tuple[str, int, Path]) -> None:
    """Draw an SVG on white to a PNG file; keep a file that is there already."""
    import resvg_py

    drawing, size, path = job
    if not is_drawn(path):
        png = resvg_py.svg_to_bytes(
            drawing, width=size, height=size, background="#ffffff", skip_system_fonts=True
        )
        write_image(path, png)
