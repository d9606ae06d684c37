"""One rule for labels, wherever they come from: lists, data sets in Python, streams and
`distap.evaluate`.
"""

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
_WHOLE = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0*)?")


def class_name(label: Any) -> str:
    """Return the name of the class that a label stands for, "" if it stands for none.

    A whole number is one class however it is written: 1, 1.0, "1" and "1.0". Zeros in front belong
    to a code: "012" and "12" are two classes. Names that differ in their Unicode form alone are one
    class. -1, NaN, None, "N/A" and an empty text are no class.

    Raises:
        ValueError: the label is a number below -1 or no whole one, or neither a number nor a text.
    """
    with suppress(ValueError, RuntimeError):  # an array or tensor of several values, refused below
        label = label.item() if hasattr(label, "item") else label
    if label is None or type(label).__name__ == "NAType":  # of pandas
        return ""
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # 1e20 too
    is_nan = isinstance(label, float) and label != label
    if not (isinstance(label, str | int) or is_nan):
        raise ValueError(
            f"label {label!r:.60} is no class; a class is a whole number of 0 or more, or a name"
        )
    text = composed(str(label).strip())
    whole = _WHOLE.fullmatch(text)
    if whole:
        text = whole[1]
    if text.lower() in NO_CLASS:
        return ""
    if (whole and text.startswith("-")) or "\0" in text:  # numpy cuts such a text off
        raise ValueError(
            f"label {text!r:.60} is no class; a class is a whole number of 0 or more, or a name"
        )
    return text


def class_name_at(where: str, label: Any) -> str:
    """Return `class_name` of a label; a DistapError names the place of one that stands for neither
    class nor none.
    """
    try:
        return class_name(label)
    except ValueError as error:
        raise DistapError(f"{where}: {error}") from error


def class_numbers(labels: Iterable[Any]) -> NDArray[np.int64]:
    """Number the classes of (N,) labels in the order of their names; -1 stands for none. See
    `class_name`.
    """
    values = np.asarray(labels)
    places = np.arange(len(values))
    if values.dtype != object:  # many images have few labels
        values, places = np.unique(values, return_inverse=True)
    names = np.array([class_name(value) for value in values.tolist()], dtype=np.str_)
    classes, numbers = np.unique(names, return_inverse=True)
    # The empty name sorts first. If it is there, one less makes it -1 and the first class 0.
    return (numbers.reshape(-1).astype(np.int64) - ("" in classes))[places.reshape(-1)]


def nesting(rows: Iterable[tuple[Any, str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    """Return the coarser classes that hold each class, from rows of its place, its name and their
    names, finer first.

    "" stands for no class. A DistapError tells the place where a class is in another one of the
    next level.
    """
    found: dict[str, tuple[str, ...]] = {}
    known: dict[tuple[int, str], str] = {}
    for where, name, levels in rows:
        if found.get(name) == levels:
            continue
        for level, (own, above) in enumerate(pairwise((name, *levels, ""))):
            if own and (before := known.setdefault((level, own), above)) != above:
                problem = (
                    f"class {own!r} of level {level} is in {above!r} of level {level + 1}, but in"
                    f" {before!r} before"
                )
                raise DistapError(f"{where}: {problem}")
        found[name] = levels
    return found


def table_of_levels(rows: Collection[tuple[str, ...]]) -> NDArray[np.str_]:
    """Return (K, L - 1) the coarser classes of K classes; "" stands for none."""
    columns = list(zip_longest(*rows, fillvalue=""))
    return np.ascontiguousarray(np.array(columns, dtype=np.str_).reshape(len(columns), len(rows)).T)
