"""Tables of figures for the terminal."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def figures_table(title: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of figures, the first column a name."""
    result = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        # Headings may wrap, so that figures are whole on a narrow terminal.
        result.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        result.add_row(*row)
    return result
