"""distap trains image-retrieval descriptors by optimising Average Precision over huge batches.

The names in __init__.pyi are the library. Each is imported when it is first used, so `import
distap` needs no torch.
"""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

RELEASE = "0.2.0"
# one list for this file, type checkers and editors
_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_MODULES = {
    name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)
}


@cache
def _version() -> str:
    """Return the release with the commit of the checkout that runs, or of what was installed:
    0.2.0+g1a2b3c4.
    """
    import subprocess  # these take longer than all else here
    from importlib import metadata

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    try:  # site-packages may lie within a checkout of something else, which does not track them
        commit = git("ls-files", "__init__.py") and git(
            "describe", "--always", "--dirty=.dirty", "--exclude=*"
        )
        if commit:
            return f"{RELEASE}+g{commit}"
        return metadata.version("distap")
    except (OSError, subprocess.SubprocessError, metadata.PackageNotFoundError):
        return RELEASE


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'distap' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_MODULES]
