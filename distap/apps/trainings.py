"""Trainings as processes of their own, for those who compare many of them."""

import os
import subprocess
import sys
from pathlib import Path

from distap.processes.forks import die_with_parent


def start_training(recipe: Path, ranks: int, output: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start `distap train` on a recipe; it ends with this process, and what it prints is appended to `output`."""
    command = [sys.executable, "-m", "distap.cli", "train", str(recipe), "--ranks", str(ranks)]
    with output.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | more, preexec_fn=die_with_parent)


def last_error(output: Path) -> str:
    """Return the last line about an error that a training printed."""
    lines = output.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if "error" in line.lower()), "no error was printed")
