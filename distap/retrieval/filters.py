"""Choose rows of an index by their key, class and columns, and group them by a column.

A condition is a text such as `category=shoes`, `price<=50` or `size in 38,39`.
"""

import csv
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError, suggestion
from distap.retrieval.descriptor_files import DescriptorSet, Texts

# Conditions that must all hold: texts, or values by column: one, several of which one must match,
# or limits such as {">=": 20, "<": 50}.
Where: TypeAlias = Mapping[str, Any] | Sequence[str] | str | None
Cell: TypeAlias = str | int | float
ORDERS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_CONDITION = re.compile(r"(.+?)\s*(<=|>=|!=|=|<|>|\sin\s)\s*(.*)", re.DOTALL)
# 007 is a code, and no number
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d{1,15})?", re.ASCII)
# Wider than a cell, as Python writes 0.1 + 0.2 with 17 decimals, and 1e-7 so; but always finite,
# since a store's SQL has no word for infinity.
_LIMIT = re.compile(r"[-+]?(\d{1,99}\.?\d*|\.\d+)(e[-+]?\d\d?)?", re.ASCII | re.IGNORECASE)


class Condition(NamedTuple):
    """A condition on a column: one of several values, none of them (!=), or a range."""

    column: str
    sign: str  # of ORDERS, or =, != or in
    values: tuple[str, ...]
    numbers: tuple[float, ...]  # those of the values that are numbers
    is_numeric: bool  # whether the column is

    @property
    def is_range(self) -> bool:
        return self.sign in ORDERS


def _unknown_column(name: str, columns: Collection[str], data: str) -> DistapError:
    return DistapError(
        "search.unknown_column",
        f"{name!r}: the index of {data} has no such column: {suggestion(name, columns)}",
    )


class ImageColumns:
    """Key, class and further columns of N images. A column is numeric if all its cells are."""

    def __init__(self, images: DescriptorSet) -> None:
        self._images = images
        self._texts: dict[str, Texts] = {
            **images.columns,
            "key": images.keys,
            "class": images.classes,
        }
        self._numbers: dict[str, NDArray[np.float64] | None] = {}
        self._groups: dict[str, NDArray[np.int64]] = {}

    def rows(self, where: Where) -> NDArray[np.int64] | None:
        """Return the rows, ascending, for which all conditions hold; None for no conditions.

        Raises:
            DistapError: a column is unknown, a condition is none, or a range is of texts.
        """
        if not where:
            return None
        types = {name: self.type_of(name) for name, _, _ in _conditions(where)}
        masks = [
            self._mask(condition) for condition in conditions_of(where, types, self._images.data)
        ]
        return np.flatnonzero(np.logical_and.reduce(masks))

    def groups(self, name: str) -> NDArray[np.int64]:
        """Return (N,) the number of each image's group: equal cells; an empty cell stands alone."""
        if name not in self._groups:
            texts = self._column(name)
            #     cells        p2  ""  p1  ""  p2
            #     numbers       2   0   1   0   2     of "", p1, p2
            #     apart         2   3   1   4   2     one of its own for each empty cell
            #     groups        1   2   0   3   1     from 0: "", which sorts first, left a gap
            names, numbers = np.unique(texts, return_inverse=True)
            empty = np.flatnonzero(texts == "")
            # Images of no product are not images of one product.
            numbers[empty] = len(names) + np.arange(len(empty))
            # Without gaps, so that the highest number tells how many there are.
            self._groups[name] = numbers - numbers.min(initial=len(names))
        return self._groups[name]

    def cells(self, row: int) -> dict[str, Cell]:
        """Return the cells of an image that are not empty, by column."""
        texts = {name: str(column[row]) for name, column in self._images.columns.items()}
        return {
            name: text if self.numbers(name) is None else _as_number(text)
            for name, text in texts.items()
            if text
        }

    def type_of(self, name: str) -> str:
        """Return the type of a column: `number` if all its cells are, else `text`."""
        return "text" if self.numbers(name) is None else "number"

    def types(self) -> dict[str, str]:
        """Return the type of each column of the list."""
        return {name: self.type_of(name) for name in self._images.columns}

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """Return (N,) the numbers of a column, NaN for empty cells; None for a column of texts."""
        if name not in self._numbers:
            # A column has far fewer prices than cells, and a text is slow to match.
            cells, places = np.unique(self._column(name), return_inverse=True)
            filled = [cell for cell in cells.tolist() if cell]
            numbers = None
            if filled and all(map(_NUMBER.fullmatch, filled)):
                numbers = np.array([float(cell or "nan") for cell in cells.tolist()])[places]
            self._numbers[name] = numbers
        return self._numbers[name]

    def _column(self, name: str) -> Texts:
        if name not in self._texts:
            raise _unknown_column(name, self._texts, self._images.data)
        return self._texts[name]

    def _mask(self, condition: Condition) -> NDArray[np.bool_]:
        texts = self._column(condition.column)
        numbers = self.numbers(condition.column)
        if numbers is None:
            mask = np.isin(texts, np.array(condition.values, np.str_))
        elif condition.is_range:
            mask = ORDERS[condition.sign](numbers, condition.numbers[0])
        else:
            # By value, so that price=12.5 finds 12.50. NaN equals nothing, so empty cells are
            # asked for by themselves.
            mask = np.isin(numbers, condition.numbers)
            if "" in condition.values:
                mask |= np.isnan(numbers)
        return ~mask if condition.sign == "!=" else mask


def conditions_of(where: Where, types: Mapping[str, str], data: str) -> Iterator[Condition]:
    """Yield the conditions on columns of these types, `text` or `number`.

    Raises:
        DistapError: a column is unknown, a condition is none, or a range is of texts.
    """
    for name, sign, values in _conditions(where):
        if name not in types:
            raise _unknown_column(name, types, data)
        is_numeric = types[name] == "number"
        numbers = [float(value) for value in values if _LIMIT.fullmatch(value)]
        if sign in ORDERS and not (is_numeric and len(numbers) == 1):
            reason = "the column holds texts" if numbers else f"{values[0]!r} is no number"
            raise DistapError(
                "search.no_number",
                f"{name}{sign}{values[0]}: {reason}; compare texts by =, != or `in`, and give each"
                " condition by itself",
            )
        # Columns are composed, but keys stay as files are named, and macOS decomposes é there. To
        # look for both forms is cheaper than a composed copy of a million keys.
        forms = [normalize(form, value) for value in values for form in ("NFC", "NFD")]
        texts = tuple(dict.fromkeys(forms))
        yield Condition(name, sign, texts, tuple(numbers), is_numeric)


def _conditions(where: Where) -> Iterable[tuple[str, str, list[str]]]:
    """Yield column, sign and values of each condition; the sign is `=` for one of several."""
    if isinstance(where, Mapping):
        for name, value in where.items():
            yield from _conditions_of_value(name, value)
        return
    for text in (where,) if isinstance(where, str) else where or ():
        condition = _CONDITION.fullmatch(text.strip())
        if condition is None:
            raise _no_condition(repr(text))
        name, sign, value = condition.groups()
        values = [value]
        if sign.strip() == "in":
            values = [cell.strip() for cell in next(csv.reader([value], skipinitialspace=True), [])]
        yield name, sign.strip(), values


def _conditions_of_value(name: str, value: Any) -> Iterable[tuple[str, str, list[str]]]:
    limits = value if isinstance(value, Mapping) else {"=": value}
    for sign, limit in limits.items():
        if sign not in (*ORDERS, "=", "!=", "in"):
            raise _no_condition(f"{name}: {sign!r}")
        several = isinstance(limit, Iterable) and not isinstance(limit, str)
        yield name, sign, list(map(str, limit if several else [limit]))


def _no_condition(text: str) -> DistapError:
    return DistapError(
        "search.no_condition",
        f"{text}: no condition; expected such as category=shoes, price<=50, or size in 38,39",
    )


def _as_number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
