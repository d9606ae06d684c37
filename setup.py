"""Version, which names the commit, and description, since PyPI has no files for README.md's
relative links.
"""

import re
import subprocess
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
RELEASE = re.search(r'^RELEASE = "(.+)"', (ROOT / "distap/__init__.py").read_text(), re.MULTILINE)[
    1
]


def absolute(link: re.Match[str]) -> str:
    """The same link or picture, to the files of this version's tag."""
    return (
        f"{link['text']}({SOURCE}/{'raw' if link['picture'] else 'blob'}/v{RELEASE}/{link['path']})"
    )


def version() -> str:
    """The release at its tag, and elsewhere with the commit: 0.2.0+g1a2b3c4, or what the sdist says
    that is built.
    """

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(
                ["git", "-C", ROOT, *arguments], capture_output=True, text=True
            ).stdout.strip()
        except OSError:
            return ""

    if (ROOT / "PKG-INFO").is_file():
        return re.search(r"^Version: (.+)", (ROOT / "PKG-INFO").read_text(), re.MULTILINE)[1]
    if not git("ls-files", "setup.py") or git("tag", "--points-at", "HEAD", f"v{RELEASE}"):
        return RELEASE
    return f"{RELEASE}+g{git('describe', '--always', '--dirty=.dirty', '--exclude=*')}"


setup(
    version=version(),
    long_description=re.sub(
        r"(?P<text>(?P<picture>!?)\[[^\]]*\])\((?!https?://|#)(?P<path>[^)]+)\)",
        absolute,
        (ROOT / "README.md").read_text(),
    ),
    long_description_content_type="text/markdown",
)
