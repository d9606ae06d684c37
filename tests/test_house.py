"""The shape of the package: its size, its names, its layers, and how much of it one step runs."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.trace import traced_step

ROOT = Path(__file__).parents[1]
MODULES = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "distap").rglob("*.py"))}
MOST_LINES, MOST_OF_A_FILE, MOST_LAYERS = 28_121, 300, 12
MOST_FILES_OF_A_STEP, MOST_LINES_OF_A_STEP = 40, 720


def test_the_package_stays_small():
    lines = {path: text.count("\n") for path, text in MODULES.items()}
    assert sum(lines.values()) <= MOST_LINES
    assert [path for path in lines if lines[path] > MOST_OF_A_FILE] == []


def test_no_public_name_is_defined_twice():
    places = defaultdict(list)
    for path, text in MODULES.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: where for name, where in places.items() if len(where) > 1 and name != "main"} == {}


def test_there_are_few_layers():
    (contract,) = (
        contract
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    assert len(contract["layers"]) <= MOST_LAYERS


def test_a_recipe_is_read_without_torch():
    code = "import sys, distap.config.reading, distap.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_reader_of_the_step_has_few_files_and_lines_to_read():
    """One step of a training with its loader and its reports, after first ones that build what is built once."""
    lines = traced_step()
    assert len(lines) <= MOST_FILES_OF_A_STEP, sorted(lines)
    assert sum(map(len, lines.values())) <= MOST_LINES_OF_A_STEP


def test_the_library_has_few_names_and_import_needs_no_torch():
    code = "import sys, distap; names = dir(distap); sys.exit('torch' in sys.modules or len(names) > 15)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    import distap

    assert all(callable(getattr(distap, name)) for name in dir(distap) if name != "__version__")
    with pytest.raises(AttributeError, match="no attribute 'Rank'"):
        _ = distap.Rank


def test_the_documents_name_files_that_exist():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("k8s/**/*.md"), *ROOT.glob("launch/**/*.md")]
    inside = re.compile(r"(?:distap|tests|benchmarks|launch|k8s|docs)/[\w./-]*\w")
    missing = {
        f"{text.relative_to(ROOT)}: {name}"
        for text in texts
        for name in re.findall(rf"`({inside.pattern})/?`|\]\(({inside.pattern})\)", text.read_text())
        for name in name
        if name and not (ROOT / name).exists()
    }
    assert missing == set()
