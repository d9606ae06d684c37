"""What launch/lock.py says of packages."""

import subprocess

from launching import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pins(*parts: str) -> dict[str, str]:
    """The version of each package that these parts of pyproject.toml need on this machine."""
    done = subprocess.run(
        [ROOT / "launch/lock.py", *parts], check=True, capture_output=True, text=True
    )
    lines = [
        line.removesuffix(" \\")
        for line in done.stdout.splitlines()
        if "==" in line and line[0] != " "
    ]
    found = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in found}
