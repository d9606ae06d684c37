"""The packages of the lock, and distap as it is released, in a virtual environment beside those of this one."""

import os
import shutil
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installed:
    """A virtual environment with distap in it, and what was built for it."""

    environment: Path
    source: Path  # a copy of the repository
    sdist: Path
    wheel: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin/python"

    @property
    def package(self) -> Path:
        (found,) = self.environment.glob("lib/python*/site-packages/distap")
        return found

    def run(self, program: str, *arguments: object, folder: Path) -> str:
        """Standard output of one of its programs, which has to succeed, in a folder outside the repository."""
        unset = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.environment / "bin" / program), *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=unset, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def pins(*parts: str) -> dict[str, str]:
    """The version of each package that these parts of pyproject.toml need on this machine."""
    done = subprocess.run([ROOT / "launch/lock.py", *parts], check=True, capture_output=True, text=True)
    found = [
        Requirement(line.removesuffix(" \\")) for line in done.stdout.splitlines() if "==" in line and line[0] != " "
    ]
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in found
        if one.marker is None or one.marker.evaluate()
    }


def install(folder: Path) -> Installed:
    """Build the sdist from a copy of the repository and the wheel from the sdist, and install the wheel."""
    source, environment = folder / "source", folder / "environment"
    for name in ("benchmarks", "distap", "docs", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    venv.create(environment)
    (pure,) = environment.glob("lib/python*/site-packages")
    (pure / "shared.pth").write_text("\n".join(site.getsitepackages()) + "\n")  # torch and all the others
    make = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", make], cwd=source, check=True, capture_output=True)
    (sdist,) = folder.glob("distap-*.tar.gz")
    pip, quiet = [sys.executable, "-m", "pip"], ["--quiet", "--no-deps", "--no-index"]
    build = [*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", folder, sdist]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("distap-*.whl")
    add = [*pip, "--python", environment / "bin/python", "install", *quiet, "--ignore-installed"]
    subprocess.run([*add, wheel], check=True, capture_output=True)
    return Installed(environment, source, sdist, wheel)
