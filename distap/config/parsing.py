"""Parse YAML exactly: no key is dropped, and errors name their place."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import yaml

from distap.errors import DistapError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, whose few lines can stand for billions of values, nor any key twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.MarkedYAMLError(problem=f"an alias, *{alias.anchor}", problem_mark=alias.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in known:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
            known.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parsed_yaml(text: str, where: str, comments: bool = True) -> Any:
    """Parse YAML; a DistapError names `where` and the place in the text.

    Without `comments`, as on a command line, a text with ` #` is that whole text: `run=runs/exp #1`.
    """
    try:
        tokens = [] if comments else list(yaml.scan(text, _Loader))
        gaps = (text[one.end_mark.index : then.start_mark.index] for one, then in pairwise(tokens))
        if any("#" in gap for gap in gaps):
            if len(tokens) <= 3:  # the stream's start and end, and a word between them
                return text
            raise DistapError(f"{where}: a comment within a value; put quotes around the text that holds #")
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as of the date 2026-02-31
        raise DistapError(f"{where}: not valid YAML: {str(error) or type(error).__name__}") from error


def line_of(text: str, keys: Sequence[str]) -> int:
    """Return the line, from 1, of the innermost of these nested keys that the text has; 0 if it has none."""
    node, line = yaml.compose(text, _Loader), 0
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = next((pair for pair in pairs if pair[0].value == key), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
