"""Figures of a new network next to those of an old one, and whether the new one fits its index."""

from collections.abc import Mapping

# Network of the queries, and network of the gallery, before the names of figures. New is the one
# that is evaluated, whose own figures have no prefix; old is the one that wrote the rows.
NEW_TO_OLD = "new-to-old"
OLD_TO_NEW = "old-to-new"
OLD_TO_OLD = "old-to-old"
NEW_TO_NEW = "new-to-new"  # in tables


def by_direction(refinement: str, figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return a column of figures for each direction; without others, for the refinement alone."""
    columns: dict[str, dict[str, float]] = {NEW_TO_NEW: {}}
    for name, value in figures.items():
        direction, _, figure = name.partition(" ")
        if direction in (NEW_TO_OLD, OLD_TO_NEW, OLD_TO_OLD):
            columns.setdefault(direction, {})[figure] = value
        else:
            columns[NEW_TO_NEW][name] = value
    if len(columns) == 1:
        return {refinement: columns[NEW_TO_NEW]}
    return columns


def upgrade_lines(figures: Mapping[str, float]) -> list[str]:
    """Return a line on whether the new network can describe queries for the old one's gallery.

    It can by the criterion of Shen et al. 2020 if its queries find more there than the old ones do.
    There is no line if either figure is missing.
    """
    for name, old in figures.items():
        direction, _, figure = name.partition(" ")
        new = figures.get(f"{NEW_TO_OLD} {figure}")
        if direction == OLD_TO_OLD and new is not None:
            holds = new > old
            return [
                f"upgrade {'holds' if holds else 'fails'} (Shen et al. 2020): new-to-old {figure}"
                f" {100 * new:.1f} is {'' if holds else 'not '}above old-to-old {100 * old:.1f}"
            ]
    return []
