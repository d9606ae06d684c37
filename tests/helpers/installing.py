"""What launch/lock.py says of packages."""

import subprocess

from launching import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pins(*extras: str) -> dict[str, str]:
    """The version of each package that these parts of pyproject.toml need on this machine."""
    done = subprocess.run(
        [ROOT / "launch/lock.py", *extras], check=True, capture_output=True, text=True
    )
    lines = [
        line.removesuffix(" \\")
        for line in done.stdout.splitlines()
        if "==" in line and line[0] != " "
    ]
    evaluation = [
        item for item in map(Requirement, lines) if item.marker is None or item.marker.evaluate()
    ]
    return {
        canonicalize_name(item.name): str(item.specifier).removeprefix("==") for item in evaluation
    }
