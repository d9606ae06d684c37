"""Error codes, read from distap's source: each place that makes a DistapError, with its message."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Areas of codes. A code is `area.problem`; the problem is what went wrong, not where.
AREAS = {
    "recipe": "recipes, their keys, and arguments of functions",
    "data": "data sets, shards, indexes and labels",
    "image": "single images",
    "storage": "files, folders and URLs",
    "loss": "losses, and what they are given",
    "sampling": "the plan of batches",
    "network": "backbones, poolings and projections",
    "weights": "weights to begin with",
    "engine": "DDP, FSDP and DeepSpeed",
    "checkpoint": "checkpoints of a training",
    "run": "run folders, and trainings as a whole",
    "ranks": "processes and hosts that work together",
    "memory": "memory of hosts and GPUs",
    "evaluation": "evaluation and ground truth",
    "descriptors": "descriptors, whitening and their files",
    "index": "indexes to search in",
    "search": "searches",
    "export": "exports",
    "serve": "the server",
    "comparison": "comparisons of networks by query",
    "tune": "the search for better settings",
    "command": "command lines",
    "package": "packages that are not installed, or too old",
    "telemetry": "metrics, logs and loggers",
}


@dataclass(frozen=True)
class MadeError:
    """A place in the source that makes an error. `code` is None if it gives none."""

    code: str | None
    message: str  # with {placeholders}
    path: Path  # relative to the repository
    line: int


def made_errors(package: str = "distap") -> list[MadeError]:
    """Return all places of a package that make a DistapError or an error derived from it.

    Those that keep the code of another error are left out.
    """
    trees = {
        path.relative_to(ROOT): ast.parse(path.read_text("utf-8"))
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    classes = _error_classes(trees)
    return [
        error
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in classes
        for error in _errors_of(node, path)
    ]


def _error_classes(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names of DistapError and of all classes that derive from it."""
    definitions = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    classes = {"DistapError"}
    while True:
        derived = {node.name for node in definitions if classes & set(map(ast.unparse, node.bases))}
        if derived <= classes:
            return classes
        classes |= derived


def _errors_of(call: ast.Call, path: Path) -> Iterator[MadeError]:
    if len(call.args) < 2:
        yield MadeError(None, " ".join(map(_text, call.args)), path, call.lineno)
        return
    code, message = call.args[:2]
    for choice in [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]:
        if isinstance(choice, ast.Constant):
            yield MadeError(choice.value, _text(message), path, call.lineno)
        elif not ast.unparse(choice).endswith("code"):
            yield MadeError(None, _text(message), path, call.lineno)


def _text(node: ast.expr) -> str:
    """Return the text of a message, its values as {placeholders}."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(_text, node.values))
        case ast.BinOp(op=ast.Add()):
            return _text(node.left) + _text(node.right)
        case ast.FormattedValue():
            return _text(node.value)
        case ast.Name():
            return f"{{{node.id}}}"
        case ast.Attribute():
            return f"{{{node.attr}}}"
        case ast.Subscript():
            return _text(node.value)
        case _:
            return "{...}"
