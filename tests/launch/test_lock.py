"""What is installed is what the lock says, file by file."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from installing import ROOT, pins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A build backend without dependencies, in place of setuptools.
BACKEND = """
import os, shutil
def build_editable(folder, *_):
    return os.path.basename(shutil.copy("distap-1.0-py3-none-any.whl", folder))
"""


def write_wheel(folder: str | Path, name: str) -> Path:
    """A package with an empty module of its name."""
    path, about = Path(folder, f"{name}-1.0-py3-none-any.whl"), f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


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


def test_an_extra_that_is_not_there_is_named():
    done = subprocess.run([ROOT / "launch/lock.py", "emojy"], capture_output=True, text=True)
    assert done.returncode == 1 and "no extra emojy; there are core, http" in done.stderr


def test_setup_takes_a_file_with_the_hash_of_the_lock_and_no_other(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = write_wheel(wheels, "sealed")
    project = tmp_path / "project"
    (project / "launch").mkdir(parents=True)
    for name in ("setup", "lock.py"):
        shutil.copy(ROOT / "launch" / name, project / "launch" / name)
    (project / "backend.py").write_text(BACKEND)
    write_wheel(project, "distap")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "distap"\nversion = "1.0"\ndependencies = ["sealed"]\n'
    )
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PYTHON": sys.executable}

    def setup(digest: str) -> subprocess.CompletedProcess[str]:
        lock = f"# Head.\n\n# core\nsealed==1.0 \\\n    --hash=sha256:{digest}\n"
        (project / "launch/requirements.txt").write_text(lock)
        return subprocess.run([project / "launch/setup", "core"], capture_output=True, text=True, env=environment)

    refused = setup("0" * 64)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr and "sealed" in refused.stderr
    assert not list(project.glob(".venv/lib/*/site-packages/sealed.py")) and not list(project.glob(".venv/.distap-*"))
    taken = setup(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert taken.returncode == 0, taken.stderr
    assert list(project.glob(".venv/lib/*/site-packages/sealed.py")) and list(project.glob(".venv/.distap-core"))
    assert setup("0" * 64).returncode == 0  # what is there already stays
