"""The command line, run in the process of the tests."""

import sys

import pytest

from distap.cli import main


def distap(monkeypatch, *arguments) -> int:
    """Run the command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["distap", *map(str, arguments)])
    with pytest.raises(SystemExit) as status:
        main()
    return int(status.value.code or 0)
