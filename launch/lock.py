#!/usr/bin/env python3
"""The packages that distap is installed with, each in one version and with the hashes of its files.

    launch/lock.py                  resolve pyproject.toml and write requirements.txt; needs uv
    launch/lock.py --upgrade        the same, with the newest versions launch/lock.py emoji dev
    print what distap with these extras needs (core: without any), for
                                    pip install --require-hashes --no-deps

It reads and writes the files beside it, on any operating system and Python that distap runs on.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
LOCK = Path(__file__).with_name("requirements.txt")
HEAD = "# Written by launch/lock.py. Above each package stands what of pyproject.toml needs it.\n"
UNIVERSAL = ["--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet"]


def sources() -> dict[str, list[str]]:
    """What uv resolves for the core alone, for each extra with the core, and for each dependency
    group.
    """
    settings = tomllib.loads(PROJECT.read_text())
    extras = settings["project"].get("optional-dependencies", {})
    groups = settings.get("dependency-groups", {})
    of_extras = {name: [str(PROJECT), "--extra", name] for name in extras}
    return (
        {"core": [str(PROJECT)]}
        | of_extras
        | {name: ["--group", f"{PROJECT}:{name}"] for name in groups}
    )


def compiled(*arguments: str) -> str:
    """What uv resolves these sources to, unless it goes to a file."""
    command = ["uv", "pip", "compile", *UNIVERSAL, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def entries(text: str) -> dict[str, str]:
    """The entry of each package, with its hashes, by its name and version."""
    found = re.findall(r"^([a-z0-9][^\s;]*)(.*(?:\n    .*)*)", text, flags=re.MULTILINE)
    return {name: name + rest for name, rest in found}


def write(*upgrade: str) -> None:
    """Resolve everything together, then find out what each part needs of it."""
    if shutil.which("uv") is None:
        sys.exit("launch/lock.py needs uv, which launch/setup installs: put .venv/bin on the PATH")
    everything = [
        argument for source in sources().values() for argument in source if argument != str(PROJECT)
    ]
    compiled(str(PROJECT), *everything, "--generate-hashes", "--output-file", str(LOCK), *upgrade)
    # which has the versions of before, unless they are to be upgraded
    whole = entries(LOCK.read_text())
    parts = {
        part: entries(compiled(*source, "--constraint", str(LOCK)))
        for part, source in sources().items()
    }
    blocks = [
        f"\n# {' '.join(part for part, needed in parts.items() if name in needed)}\n{entry}\n"
        for name, entry in whole.items()
    ]
    LOCK.write_text(HEAD + "".join(blocks))


def needed(parts: list[str]) -> str:
    """The entries of the lock that distap with these extras, or a dependency group, needs."""
    unknown = set(parts) - set(sources())
    if unknown:
        sys.exit(
            f"{PROJECT}: no extra {', '.join(sorted(unknown))}; there are {', '.join(sources())}"
        )
    blocks = (block.partition("\n") for block in LOCK.read_text().split("\n# ")[1:])
    return "".join(entry for of, _, entry in blocks if set(of.split()) & set(parts))


if __name__ == "__main__":
    asked = sys.argv[1:]
    if asked and asked != ["--upgrade"]:
        sys.stdout.write(needed(asked))
    else:
        write(*asked)
