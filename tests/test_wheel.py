"""What a release holds, and what a user has who installed it: commands, library and types, outside the repository."""

import os
import re
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from installing import ROOT

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


def package_in(source: Path) -> set[str]:
    walk = os.walk(source / "distap")
    return {str(Path(folder, name).relative_to(source)) for folder, _, names in walk for name in names}


def without_metadata(names: list[str]) -> set[str]:
    return {
        name for name in names if not re.search(r"(^|/)(distap[^/]*\.(dist|egg)-info/|PKG-INFO$|setup\.cfg$)", name)
    }


def test_the_wheel_holds_the_package_and_nothing_else(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    assert without_metadata(names) == package_in(installed.source)
    assert {"distap/py.typed", "distap/recipes/emoji.yaml"} <= set(names)
    assert f"distap-{distap.__version__}.dist-info/licenses/LICENSE" in names


def test_the_sdist_holds_the_package_and_what_builds_it(installed):
    with tarfile.open(installed.sdist) as sdist:
        names = [found.name.partition("/")[2] for found in sdist if found.isfile()]
    beside = {path.name for path in installed.source.iterdir() if path.is_file()}
    assert without_metadata(names) == package_in(installed.source) | beside
    assert {"LICENSE", "README.md", "setup.py"} <= beside


def test_links_of_the_description_lead_to_files_of_this_version(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        description = message_from_bytes(wheel.read(name)).get_payload()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", description)
    assert len(links) > 20 and all(link.startswith("https://") for _, link in links)
    tag = f"https://github.com/distap/distap/(raw|blob)/v{re.escape(distap.__version__)}/"
    ours = [(picture, re.match(tag + "(.+)", link)) for picture, link in links if "github.com/distap" in link]
    assert [found[2] for _, found in ours if not (ROOT / found[2]).exists()] == []
    assert all((found[1] == "raw") == bool(picture) for picture, found in ours)


def test_the_library_and_the_commands_run_outside_the_repository(tmp_path, installed, training_shards):
    (tmp_path / "user.py").write_text(USER)
    assert str(installed.package) in installed.run("python", "user.py", folder=tmp_path)
    assert "Usage: distap" in installed.run("distap", "--help", folder=tmp_path)
    assert "roadmap-sop" in installed.run("distap", "recipes", folder=tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        f"run: mine\nsteps: 1\ndata: {{train: {training_shards[0]}, image_size: 32, workers: 0}}\n"
        "sampling: {name: random, batch_size: 8}\nmodel: {backbone: test_resnet, weights: random}\n"
    )
    installed.run("distap", "train", "recipe.yaml", folder=tmp_path)
    describe = "import distap; print(distap.load('mine', device='cpu').dimensions)"
    assert int(installed.run("python", "-c", describe, folder=tmp_path)) > 0
