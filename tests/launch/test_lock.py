"""What is installed is what the lock says, file by file."""

import re
import tomllib
from functools import cache
from importlib import metadata

import pytest
from installing import pins
from launching import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

requires, version = cache(metadata.requires), cache(metadata.version)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed(requirement: Requirement, seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The installed packages, with versions, that a requirement leads to; those of `seen` are known."""
    name = canonicalize_name(requirement.name)
    for extra in requirement.extras or {""}:
        if (name, extra) not in seen:
            seen.add((name, extra))
            for line in requires(name) or ():
                one = Requirement(line)
                if one.marker is None or one.marker.evaluate({"extra": extra}) or one.marker.evaluate({"extra": ""}):
                    needed(one, seen)
    return seen


@pytest.mark.parametrize("extra", ["core", "emoji", "s3", "formats", "onnx", "dev"])
def test_each_extra_has_all_that_it_needs_in_the_versions_that_were_tested(extra):
    locked, seen = pins(extra), set()
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, []):
        needed(Requirement(line), seen)
    names = {name for name, _ in seen} - {"distap"}  # of which `dev` takes the extra `all`
    assert len(names) > 40 and "setuptools" in names  # with which launch/setup builds
    assert {name: locked.get(name) for name in names} == {name: version(name).partition("+")[0] for name in names}


def test_every_package_of_the_lock_has_a_version_and_hashes():
    blocks = (ROOT / "launch/requirements.txt").read_text().split("\n\n")[1:]
    assert len(blocks) > 200
    for block in blocks:
        parts, pin, *hashes = block.strip().split("\n")
        assert re.match(r"# [a-z0-9 -]+$", parts) and re.match(
            r"[a-z0-9._\[\],-]+==[\w.!+]+( ; .+)? \\$", pin.lower()
        ), block
        assert hashes and all(re.match(r"    --hash=sha256:[0-9a-f]{64}( \\)?$", one) for one in hashes), block
    for script in ("launch/setup", "launch/container/Dockerfile"):  # pip refuses a file with another hash
        assert "--require-hashes" in (ROOT / script).read_text(), script
