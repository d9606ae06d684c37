"""The workflows of GitHub name what is there, support what pyproject.toml promises, and may do
little.
"""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from launching import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

import distap

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {path.name: path for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
# In YAML 1.1 `on` is a truth value.
WORKFLOWS = {
    name: yaml.safe_load(path.read_text().replace("\non:", "\n'on':"))
    for name, path in FILES.items()
}
JOBS = {
    (name, key): job
    for name, workflow in WORKFLOWS.items()
    for key, job in workflow["jobs"].items()
}
RELEASED = ("distap/__init__.py", "CITATION.cff", "CHANGELOG.md", "launch/check-release")


def named(pattern: str) -> list[str]:
    return [matches for path in FILES.values() for matches in re.findall(pattern, path.read_text())]


def test_the_oldest_and_newest_python_and_torch_of_pyproject_are_tested():
    of_classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={of_classifiers[0]}"
    (torch,) = (
        requirement
        for line in PROJECT["dependencies"]
        if (requirement := Requirement(line)).name == "torch"
    )
    bounds = {actual.operator: Version(actual.version) for actual in torch.specifier}
    oldest = bounds[">="]
    newest = bounds["<"]
    assert JOBS["tests.yml", "bounds"]["strategy"]["matrix"]["include"] == [
        {"python": of_classifiers[0], "torch": f"2.{oldest.minor}", "resolution": "lowest-direct"},
        {"python": of_classifiers[-1], "torch": f"2.{newest.minor - 1}", "resolution": "highest"},
    ]
    assert JOBS["tests.yml", "locked"]["strategy"]["matrix"]["python"] == [
        of_classifiers[0],
        of_classifiers[-1],
    ]
    locked = re.search(
        r"^torch==(2\.\d+)\.", (ROOT / "launch/requirements.txt").read_text(), re.MULTILINE
    )
    assert locked[1] == f"2.{newest.minor - 1}"


def test_every_action_is_pinned_by_its_commit_and_no_job_may_write_what_is_not_listed_here():
    pins = named(r"uses: (\S+)")
    assert len(pins) == len(named(r"uses: [\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+\n")) > 10
    assert len(set(pins)) == len({pin.split("@")[0] for pin in pins})  # one version of each action
    assert all(
        workflow["permissions"] in ({}, {"contents": "read"}) for workflow in WORKFLOWS.values()
    )
    inputs = [access for job in JOBS.values() for access in job.get("permissions", {}).items()]
    assert sorted(name for name, access in inputs if access == "write") == [
        *("attestations", "id-token", "id-token", "packages")
    ]


@pytest.fixture
def release(tmp_path):
    """A copy of what `launch/check-release` reads, with version 9.8.7 as CONTRIBUTING.md tells to
    release it.
    """
    for name in RELEASED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, old, new in (
        ("distap/__init__.py", f'RELEASE = "{distap.RELEASE}"', 'RELEASE = "9.8.7"'),
        ("CITATION.cff", f"\nversion: {distap.RELEASE}\n", "\nversion: 9.8.7\n"),
        ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n## [9.8.7] - 2030-01-02\n"),
    ):
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1, name
        (tmp_path / name).write_text(text.replace(old, new))
    return tmp_path


def check_release(folder, tag):
    return subprocess.run([folder / "launch/check-release", tag], capture_output=True, text=True)


def test_a_tag_that_is_the_version_everywhere_is_released_and_no_other(release):
    done = check_release(release, "v9.8.7")
    assert done.returncode == 0, done.stderr
    for tag in ("v9.8.8", "9.8.7", "v9.8.7rc1", f"v{distap.RELEASE}"):
        done = check_release(release, tag)
        assert done.returncode == 1 and "distap/__init__.py: 9.8.7" in done.stderr


@pytest.mark.parametrize("name", RELEASED[:3])
def test_a_file_that_was_forgotten_is_named(release, name):
    shutil.copy(ROOT / name, release / name)
    done = check_release(release, "v9.8.7")
    assert done.returncode == 1 and re.search(rf"{name}.*: (?!9\.8\.7)", done.stderr)
