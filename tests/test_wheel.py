"""What a release holds, and what a user has who installed it: commands, library and types, outside
the repository.
"""

import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from launching import ROOT

import distap

USER = """
import torch
from torch import nn

import distap
from distap import Multistage, evaluate, load, rank

multistage = Multistage(nn.Sequential(nn.Flatten(), nn.Linear(48, 8)), loss="ap_q", micro_batch=4)
images, labels = torch.randn(8, 3, 4, 4), torch.arange(8) // 2
loss = multistage(images, labels)
loss.backward()
print(distap.__file__, evaluate(torch.eye(8), labels)["mAP"])
"""
pytestmark = pytest.mark.slow

BUILDING = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
)


class Installed:
    """distap as it is released, in a virtual environment that sees the packages of this one."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        self.programs = folder / "environment/bin"
        for name in ("benchmarks", "distap", "docs", "tests"):
            shutil.copytree(
                ROOT / name, self.source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for name in BUILDING:
            shutil.copy(ROOT / name, self.source)
        venv.create(folder / "environment")
        (self.packages,) = folder.glob("environment/lib/python*/site-packages")
        (self.packages / "shared.pth").write_text(
            "\n".join(site.getsitepackages()) + "\n"
        )  # torch and all the others
        git = ["git", "-C", self.source, "-c", "user.name=us", "-c", "user.email=us@example.org"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
            subprocess.run([*git, *command], check=True)
        described = subprocess.run(
            [*git, "describe", "--always"], capture_output=True, text=True
        ).stdout.strip()
        self.version = f"{distap.RELEASE}+g{described}"
        make = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
        subprocess.run(
            [sys.executable, "-c", make], cwd=self.source, check=True, capture_output=True
        )
        (self.sdist,) = folder.glob("distap-*.tar.gz")
        pip = [sys.executable, "-m", "pip"]
        quiet = ["--quiet", "--no-deps", "--no-index"]
        build = [*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", folder, self.sdist]
        subprocess.run(build, check=True, capture_output=True)
        (self.wheel,) = folder.glob("distap-*.whl")
        add = [
            *pip,
            "--python",
            self.programs / "python",
            "install",
            *quiet,
            "--ignore-installed",
            self.wheel,
        ]
        subprocess.run(add, check=True, capture_output=True)

    def run(self, program: str, *arguments: object, folder: Path) -> str:
        """Standard output of one of its programs, which has to succeed, in a folder outside the
        repository.
        """
        unset = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.programs / program), *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=unset, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"))


def package_in(source: Path) -> set[str]:
    return {
        str(path.relative_to(source)) for path in (source / "distap").rglob("*") if path.is_file()
    }


def without_metadata(names: list[str]) -> set[str]:
    of_setuptools = re.compile(r"(^|/)(distap[^/]*\.(dist|egg)-info/|PKG-INFO$|setup\.cfg$)")
    return {name for name in names if not of_setuptools.search(name)}


def test_the_wheel_holds_the_package_and_nothing_else(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    assert without_metadata(names) == package_in(installed.source)
    assert {"distap/py.typed", "distap/recipes/emoji.yaml"} <= set(names)
    assert f"{installed.wheel.name.rsplit('-', 3)[0]}.dist-info/licenses/LICENSE" in names


def test_the_sdist_holds_the_package_and_what_builds_it(installed):
    with tarfile.open(installed.sdist) as sdist:
        names = [member.name.partition("/")[2] for member in sdist if member.isfile()]
    beside = {path.name for path in installed.source.iterdir() if path.is_file()}
    assert without_metadata(names) == package_in(installed.source) | beside
    assert {"LICENSE", "README.md", "setup.py"} <= beside


def test_links_of_the_description_lead_to_files_of_this_version(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        description = message_from_bytes(wheel.read(name)).get_payload()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", description)
    assert len(links) > 20 and all(link.startswith("https://") for _, link in links)
    tag = f"https://github.com/distap/distap/(raw|blob)/v{re.escape(distap.RELEASE)}/"
    ours = [
        (picture, re.match(tag + "(.+)", link))
        for picture, link in links
        if "github.com/distap" in link
    ]
    assert [match[2] for _, match in ours if not (ROOT / match[2]).exists()] == []
    assert all((match[1] == "raw") == bool(picture) for picture, match in ours)


def test_the_library_and_the_commands_run_outside_the_repository(
    tmp_path, installed, training_shards
):
    assert installed.run("distap", "--version", folder=tmp_path) == f"distap {installed.version}\n"
    assert "roadmap-sop" in installed.run("distap", "recipes", folder=tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        f"run: mine\nsteps: 1\ndata: {{train: {training_shards[0]}, image_size: 32, workers: 0}}\n"
        "sampling: {name: random, batch_size: 8}\nmodel: {backbone: test_resnet, weights: random}\n"
    )
    installed.run("distap", "train", "recipe.yaml", folder=tmp_path)
    (tmp_path / "user.py").write_text(
        f"{USER}assert distap.load('mine', device='cpu').dimensions > 0\n"
    )
    assert str(installed.packages / "distap") in installed.run("python", "user.py", folder=tmp_path)
