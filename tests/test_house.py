"""The shape of the package: its files, its names, its layers, and how much of it one step runs."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from plainness import nodes, plainness

from benchmarks.trace import traced_step

ROOT = Path(__file__).parents[1]
MODULES = {
    path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "distap").rglob("*.py"))
}
MOST_LINES_OF_A_FILE = 400
MOST_LAYERS = 10
# The size of the package, in expressions and statements, and how plainly it is written. Each number
# may only fall, but for `nodes`, which a new mechanism may raise (CONTRIBUTING.md says why they are
# here). A longer name, a keyword, a comment or a wrapped line costs nothing.
MOST_OF_PACKAGE = {
    "nodes": 166_800,
    "nodes a line": 5.3,
    "pairs": 0.2,
    "walruses": 0.4,
    "pronouns": 3.2,
    "packs": 0.2,
    "branchy": 3.2,
    "above 15": 1,
    "above 20": 0,
}
LEAST_COMMENTS = 5  # percent of the lines of code
MOST_OF_OTHERS = {
    "nodes a line": 5.7,
    "pairs": 0.2,
    "walruses": 1.3,
    "pronouns": 2.6,
    "packs": 0.5,
}
MOST_FILES_OF_A_STEP = 30
# expressions and statements that begin on the lines which one step runs
MOST_NODES_OF_A_STEP = 5_800
MOST_ROOMS = 26
MOST_FLOORS = 10


def test_no_file_is_long():
    lines = {path: text.count("\n") for path, text in MODULES.items()}
    assert [path for path in lines if lines[path] > MOST_LINES_OF_A_FILE] == []


def test_the_package_is_small_and_plain():
    measures = plainness(MODULES.values())
    above = {
        name: measures[name] for name, most in MOST_OF_PACKAGE.items() if measures[name] > most
    }
    assert above == {}
    assert measures["comments"] >= LEAST_COMMENTS


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_benchmarks_and_tests_are_plain(folder):
    measures = plainness(path.read_text() for path in sorted((ROOT / folder).rglob("*.py")))
    assert {
        name: measures[name] for name, most in MOST_OF_OTHERS.items() if measures[name] > most
    } == {}


def modules_imported(node: ast.AST, names: set[str]) -> set[str]:
    """The modules, of those named, that a module imports when it runs, in its functions too."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return set()
    imports = set().union(*(modules_imported(child, names) for child in ast.iter_child_nodes(node)))
    if isinstance(node, ast.ImportFrom) and node.module:
        places = (f"{node.module}.{alias.name}" for alias in node.names)
        imports |= {place if place in names else node.module for place in places}
    elif isinstance(node, ast.Import):
        imports |= {alias.name for alias in node.names}
    return imports & names


FILES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
IMPORTS = {path: modules_imported(ast.parse(text), set(FILES)) for path, text in MODULES.items()}


def test_no_file_imports_itself_through_others():
    imports = {name: IMPORTS[path] - {name} for name, path in FILES.items()}
    TopologicalSorter(imports).prepare()  # which raises CycleError and names the circle


def test_no_public_name_is_defined_twice():
    places = defaultdict(list)
    for path, text in MODULES.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {
        name: where for name, where in places.items() if len(where) > 1 and name != "main"
    } == {}


def constants(tree: ast.Module) -> dict[str, str]:
    """The constants that a module defines at its top level, and the code of their values."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            targets = getattr(node.targets[0], "elts", node.targets)
            values = (
                node.value.elts
                if len(targets) > 1 and isinstance(node.value, ast.Tuple)
                else [node.value]
            )
            pairs = zip(targets, values * (1 + len(targets) - len(values)), strict=True)
            found |= {ast.unparse(target): ast.unparse(value) for target, value in pairs}
    return {name: value for name, value in found.items() if name.isupper()}


def test_a_constant_has_one_meaning():
    meanings = defaultdict(set)
    for text in MODULES.values():
        for name, value in constants(ast.parse(text)).items():
            meanings[name].add(value)
    assert {name for name, values in meanings.items() if len(values) > 1} == set()


def test_rooms_are_few_and_stand_on_few_floors():
    """A room is a folder or a module of distap; it stands one floor above the highest room that it
    imports.
    """
    rooms = defaultdict(set)
    for path in MODULES:
        room = path.with_suffix("").parts[1]
        rooms[room] |= {FILES[name].with_suffix("").parts[1] for name in IMPORTS[path]} - {room}
    floors = {}
    for room in TopologicalSorter(rooms).static_order():  # which raises CycleError at a circle
        floors[room] = 1 + max((floors[below] for below in rooms[room]), default=0)
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)
    assert max(floors.values()) <= MOST_FLOORS, sorted(floors.items(), key=lambda one: one[1])


def test_there_are_few_layers():
    (contract,) = (
        contract
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
            "importlinter"
        ]["contracts"]
        if contract["type"] == "layers"
    )
    assert len(contract["layers"]) <= MOST_LAYERS


def test_a_recipe_is_read_without_torch():
    code = "import sys, distap.config.reading, distap.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_reader_of_the_step_has_few_files_and_expressions_to_read():
    """One step of a training with its loader and its reports, after first ones that build what is
    built once.
    """
    lines = traced_step()
    assert len(lines) <= MOST_FILES_OF_A_STEP, sorted(lines)
    traced = [
        node
        for path, text in MODULES.items()
        for node in nodes(ast.parse(text))
        if node.lineno in lines.get(str(path.relative_to("distap")), ())
    ]
    assert len(traced) <= MOST_NODES_OF_A_STEP


def test_the_library_has_few_names_and_import_needs_no_torch():
    code = (
        "import sys, distap; names = dir(distap); sys.exit('torch' in sys.modules or len(names)"
        " > 15)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    import distap

    assert all(callable(getattr(distap, name)) for name in dir(distap) if name != "__version__")
    with pytest.raises(AttributeError, match="no attribute 'Rank'"):
        _ = distap.Rank


def test_the_documents_name_files_that_exist():
    texts = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("k8s/**/*.md"),
        *ROOT.glob("launch/**/*.md"),
    ]
    inside = re.compile(r"(?:distap|tests|benchmarks|launch|k8s|docs)/[\w./-]*\w")
    missing = {
        f"{text.relative_to(ROOT)}: {name}"
        for text in texts
        for name in re.findall(
            rf"`({inside.pattern})/?`|\]\(({inside.pattern})\)", text.read_text()
        )
        for name in name
        if name and not (ROOT / name).exists()
    }
    assert missing == set()
