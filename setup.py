"""Only the description is made here, since PyPI has no files for README.md's relative links to lead to."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "distap/__init__.py").read_text(), re.MULTILINE)[1]


def absolute(link: re.Match[str]) -> str:
    """The same link or picture, to the files of this version's tag."""
    return f"{link['text']}({SOURCE}/{'raw' if link['picture'] else 'blob'}/v{VERSION}/{link['path']})"


setup(
    long_description=re.sub(
        r"(?P<text>(?P<picture>!?)\[[^\]]*\])\((?!https?://|#)(?P<path>[^)]+)\)",
        absolute,
        (ROOT / "README.md").read_text(),
    ),
    long_description_content_type="text/markdown",
)
