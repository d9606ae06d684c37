"""Classes of labels, by one rule for lists, data sets in Python, streams and `distap.evaluate`."""

import math
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.storage.names import composed

# Texts that pandas, R, Excel and people write for a missing label.
NO_CLASS = frozenset({"", "-1", "nan", "-nan", "none", "null", "na", "n/a", "#n/a", "<na>", "nat"})
Levels = tuple[str, ...]  # names of the coarser classes that hold a class, finer first; "" for none

Texts = NDArray[np.str_]

RULE = "a class is a whole number of 0 or more, or a name"
_WHOLE = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0*)?")


def class_name(label: Any) -> str:
    """Return the name of the class that a label stands for, "" if it stands for none.

    A whole number is one class however it is written: 1, 1.0, "1" and "1.0". Zeros in front belong
    to a code: "012" and "12" are two classes. Names that differ in their Unicode form alone are one
    class. -1, NaN, None, "N/A" and an empty text are no class.

    Raises:
        ValueError: the label is a number below -1 or no whole one, or neither a number nor a text.
    """
    value = _plain(label)
    if value is None:
        return ""
    if not isinstance(value, str | int):
        raise ValueError(f"label {value!r:.60} is no class; {RULE}")
    text = composed(str(value).strip())
    whole = _WHOLE.fullmatch(text)
    text = whole[1] if whole else text
    if text.lower() in NO_CLASS:
        return ""
    if (whole and text.startswith("-")) or "\0" in text:  # numpy cuts a text off at a zero
        raise ValueError(f"label {text!r:.60} is no class; {RULE}")
    return text


def _plain(label: Any) -> Any:
    """Return the value of a number of numpy, torch or pandas; None if it is missing."""
    with suppress(ValueError, RuntimeError):  # an array or tensor of several values has no item
        label = label.item() if hasattr(label, "item") else label
    if isinstance(label, float):
        if math.isnan(label):
            return None
        return int(label) if label.is_integer() else label  # 1e20 too
    return None if type(label).__name__ == "NAType" else label  # of pandas


def class_name_at(where: str, label: Any) -> str:
    """Return `class_name` of a label; a DistapError names the place `where` of a wrong label."""
    try:
        return class_name(label)
    except ValueError as error:
        raise DistapError("data.wrong_label", f"{where}: {error}") from error


def class_numbers(labels: Iterable[Any]) -> NDArray[np.int64]:
    """Return (N,) numbers of the labels' classes, in the order of their names; -1 for no class.

    See `class_name`.
    """
    values = np.asarray(labels)
    places = np.arange(len(values))
    if values.dtype != object:  # many images have few labels
        values, places = np.unique(values, return_inverse=True)
    names = np.array([class_name(value) for value in values.tolist()], dtype=np.str_)
    classes, numbers = np.unique(names, return_inverse=True)
    # The empty name sorts first. If it is there, one less makes it -1 and the first class 0.
    return (numbers.reshape(-1).astype(np.int64) - ("" in classes))[places.reshape(-1)]


def nesting(rows: Iterable[tuple[Any, str, Levels]]) -> dict[str, Levels]:
    """Return the coarser classes that hold each class, finer first, by its name.

    Args:
        rows: the place, for messages, the name of a class and those of the coarser ones, finer
            first. "" stands for no class.
    Raises:
        DistapError: a class is in another one of the next level than in an earlier row.
    """
    levels_of: dict[str, Levels] = {}
    holders: dict[tuple[int, str], tuple[str, Any]] = {}  # each with the place that says so
    for where, name, levels in rows:
        if levels_of.get(name) == levels:
            continue
        for level, (inner, outer) in enumerate(pairwise((name, *levels, ""))):
            before, first = holders.setdefault((level, inner), (outer, where))
            if inner and before != outer:
                raise DistapError(
                    "data.crossing_levels",
                    f"{where}: class {inner!r} of level {level} is in {outer!r} of level"
                    f" {level + 1}, but {first} has it in {before!r}",
                )
        levels_of[name] = levels
    return levels_of


def table_of_levels(rows: Collection[Levels]) -> Texts:
    """Return (K, L - 1) the coarser classes of K classes; "" stands for none."""
    columns = list(zip_longest(*rows, fillvalue=""))
    return np.ascontiguousarray(np.array(columns, dtype=np.str_).reshape(len(columns), len(rows)).T)
