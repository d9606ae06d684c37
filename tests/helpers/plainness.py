"""Measures of how plainly Python code is written, which tests/test_house.py holds to bounds."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert)
# Words that stand for a noun which a reader has to look for elsewhere.
PRONOUNS = set()
for line in (
    "one each own found given told known parts part others how of rest mine more most about there",
    "these some such which what kept said least few every",
):
    PRONOUNS |= set(line.split())


def nodes(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements of a syntax tree: the size of code at any width."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt))


def complexity(function: ast.AST) -> int:
    """Return 1 + the number of branches of a function, without those of functions inside it."""
    total = 1
    remaining = list(ast.iter_child_nodes(function))
    while remaining:
        node = remaining.pop()
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        elif isinstance(node, BRANCHES):
            total += 1
        remaining += ast.iter_child_nodes(node)
    return total


def functions(trees: Iterable[ast.Module]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def is_pair(node: ast.AST) -> bool:
    """Return whether a statement is `a, b = x, y` of things that do not need each other."""
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)):
        return False
    if not (isinstance(node.value, ast.Tuple)):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    names = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    values = {ast.unparse(value) for value in node.value.elts}
    return len(node.targets[0].elts) == len(node.value.elts) and not targets & (names | values)


def is_pronoun(node: ast.AST) -> bool:
    """Return whether a node binds one of PRONOUNS, as a parameter or as a variable."""
    if isinstance(node, ast.arg):
        return node.arg in PRONOUNS
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS


def packs(function: ast.AST) -> int:
    """Count the tuples and dicts that a function names in order to unpack them once in a call."""
    literals = set()
    unpacked = Counter[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Dict):
            literals |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Call):
            values = [argument.value for argument in node.args if isinstance(argument, ast.Starred)]
            values += [keyword.value for keyword in node.keywords if keyword.arg is None]
            unpacked.update(value.id for value in values if isinstance(value, ast.Name))
    return sum(unpacked[name] == 1 for name in literals)


def lines_of_docstrings(tree: ast.Module) -> set[int]:
    lines = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def plainness(texts: Iterable[str]) -> dict[str, float]:
    """Measure modules by their texts.

    `nodes` is a count. `nodes a line` is per line of code: no blank line, comment or docstring.
    `pairs`, `walruses`, `pronouns` and `packs` are per 1,000 lines of code. `branchy` is the
    percentage of functions whose complexity is above 10; `above 15` and `above 20` count functions.
    `comments` is the percentage of comment lines per line of code.
    """
    count = Counter[str]()
    branches = list[int]()
    for text in texts:
        tree = ast.parse(text)
        count["nodes"] += sum(1 for _ in nodes(tree))
        for node in ast.walk(tree):
            count["walruses"] += isinstance(node, ast.NamedExpr)
            count["pairs"] += is_pair(node)
            count["pronouns"] += is_pronoun(node)
        for function in functions([tree]):
            count["packs"] += packs(function)
            branches.append(complexity(function))
        docstrings = lines_of_docstrings(tree)
        lines = [
            line.strip()
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip() and number not in docstrings
        ]
        comments = sum(line.startswith("#") for line in lines)
        count["comments"] += comments
        count["lines"] += len(lines) - comments
    measures: dict[str, float] = {"nodes": count["nodes"]}
    measures["nodes a line"] = count["nodes"] / count["lines"]
    for name in ("pairs", "walruses", "pronouns", "packs"):
        measures[name] = 1000 * count[name] / count["lines"]
    measures["branchy"] = 100 * sum(number > 10 for number in branches) / len(branches)
    measures["above 15"] = sum(number > 15 for number in branches)
    measures["above 20"] = sum(number > 20 for number in branches)
    measures["comments"] = 100 * count["comments"] / count["lines"]
    return measures
