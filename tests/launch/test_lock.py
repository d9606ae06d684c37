"""What is installed is what the lock says, file by file."""

import tomllib
from functools import cache
from importlib import metadata

import pytest
from installing import pins
from launching import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

requires = cache(metadata.requires)
version = cache(metadata.version)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed(requirement: Requirement, seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The installed packages, with versions, that a requirement leads to; those of `seen` are
    known.
    """
    name = canonicalize_name(requirement.name)
    for extra in requirement.extras or {""}:
        if (name, extra) not in seen:
            seen.add((name, extra))
            for line in requires(name) or ():
                item = Requirement(line)
                if (
                    item.marker is None
                    or item.marker.evaluate({"extra": extra})
                    or item.marker.evaluate({"extra": ""})
                ):
                    needed(item, seen)
    return seen


@pytest.mark.parametrize("extra", ["core", "emoji", "s3", "formats", "onnx", "dev"])
def test_each_extra_has_all_that_it_needs_in_the_versions_that_were_tested(extra):
    locked = pins(extra)
    seen = set()
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, []):
        needed(Requirement(line), seen)
    names = {name for name, _ in seen} - {"distap"}  # of which `dev` takes the extra `all`
    assert len(names) > 40 and "setuptools" in names  # with which launch/setup builds
    assert {name: locked.get(name) for name in names} == {
        name: version(name).partition("+")[0] for name in names
    }
