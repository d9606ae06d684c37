"""Pickles of other people, read without running anything of theirs.

A pickle names functions and calls them, so it can do whatever Python can. The ones that data sets come as need only
plain containers, numbers, strings and numpy arrays. Each name that numpy writes stands for something below that keeps
data and does nothing else; any other name is refused.
"""

import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distap.errors import DistapError
from distap.storage.pickles import ForbiddenGlobalError, RestrictedUnpickler

ARRAY_CLASS = object()  # stands for numpy.ndarray, which pickles name but never call
ORDERS: dict[str, Literal["<", ">", "="]] = {"<": "<", ">": ">", "=": "=", "|": "="}
PLAIN_TYPE = re.compile(r"[?biuf]\d{1,2}|\?|[SUO]\d{0,9}")


class _Type:
    """Stands for numpy.dtype, of numbers, texts and lists only."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.order: Literal["<", ">", "="] = "="

    def __setstate__(self, state: Any) -> None:
        _, order, subtype, names, fields, size, *_ = state
        if order not in ORDERS or subtype is not None or names is not None or fields is not None:
            raise pickle.UnpicklingError("array of records")
        self.order = ORDERS[order]
        if self.code[0] in "SU" and isinstance(size, int) and 0 < size < 2**20:
            self.code = f"{self.code[0]}{size // (4 if self.code[0] == 'U' else 1)}"

    def numpy(self) -> np.dtype[Any]:
        """The numpy type."""
        return np.dtype(self.code).newbyteorder(self.order)


class _Array:
    """Stands for a numpy array; holds its values as a list, row after row."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, data = state
        if not isinstance(kind, _Type) or not isinstance(shape, tuple) or (columns_first and len(shape) > 1):
            raise pickle.UnpicklingError("array of an unknown layout")
        if kind.code.startswith("O"):
            self.values = list(data)
        else:
            self.values = np.frombuffer(_bytes(data), kind.numpy()).tolist()
        if len(self.values) != math.prod(shape):
            raise pickle.UnpicklingError(f"array of shape {shape!r:.60} with {len(self.values)} values")


def _type(code: Any, align: Any = False, copy: Any = True) -> _Type:
    if not isinstance(code, str) or not PLAIN_TYPE.fullmatch(code):
        raise pickle.UnpicklingError(f"array of type {code!r:.60}")
    return _Type(code)


def _reconstruct(subtype: Any, shape: Any, kind: Any) -> _Array:
    if subtype is not ARRAY_CLASS:
        raise pickle.UnpicklingError("array of an unknown class")
    return _Array()


def _scalar(kind: Any, data: Any) -> Any:
    (value,) = np.frombuffer(_bytes(data), kind.numpy()).tolist()
    return value


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, kind, order == "F", data))
    return array


def _no_bytes() -> bytes:
    """How protocol 2 writes bytes of length 0, those of an empty array."""
    return b""


def _encode(text: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes; other codecs would be code by another name."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding!r:.60}")
    return str(text).encode("latin1")


def _bytes(data: Any) -> bytes:
    # Python 2 wrote bytes as strings, which are read as Latin-1.
    return data.encode("latin1") if isinstance(data, str) else bytes(memoryview(data))


ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): ARRAY_CLASS,
    ("numpy", "dtype"): _type,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


def load_plain(path: Path) -> Any:
    """The contents of a pickle of plain containers, numbers, strings and numpy arrays; use `items` on its arrays.

    Raises:
        DistapError: it cannot be read, is damaged, or names anything else.
    """
    try:
        with path.open("rb") as file:
            return RestrictedUnpickler(file, ALLOWED, encoding="latin1").load()
    except ForbiddenGlobalError as error:
        raise DistapError(
            f"{path}: names {error}, which plain data has no need of: nothing of it was run; "
            "get the file from the authors of the data set"
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DistapError(f"{path}: not a readable pickle of plain data: {error}") from error


def items(path: Path, value: Any, what: str) -> Sequence[Any]:
    """The members of a list, tuple or array.

    Raises:
        DistapError: it is something else.
    """
    if isinstance(value, _Array):
        return value.values
    if isinstance(value, list | tuple):
        return value
    raise DistapError(f"{path}: {what} is no list but {type(value).__name__.strip('_')}")


def integers(path: Path, value: Any, what: str, below: int | None = None) -> list[int]:
    """The members of a list of whole numbers of 0 or more.

    Raises:
        DistapError: one is no such number, or not below the limit.
    """
    numbers = items(path, value, what)
    for place, number in enumerate(numbers):
        whole = isinstance(number, int | float) and not isinstance(number, bool) and number >= 0 and number % 1 == 0
        if not whole or (below is not None and number >= below):
            limit = "" if below is None else f" below {below}"
            raise DistapError(f"{path}: {what}[{place}] is {number!r:.60}, expected a whole number{limit}")
    return [int(number) for number in numbers]


def names(path: Path, value: Any, what: str) -> list[str]:
    """The members of a list of names, which are words without spaces.

    Raises:
        DistapError: one is something else, or two are the same.
    """
    words = items(path, value, what)
    for place, word in enumerate(words):
        if not isinstance(word, str) or word.split() != [word] or not word.isprintable():
            raise DistapError(f"{path}: {what}[{place}] is {word!r:.60}, expected a name")
    if len(set(words)) < len(words):
        raise DistapError(f"{path}: {what} has the same name twice")
    return list(words)


def member(path: Path, value: Any, key: str, what: str = "") -> Any:
    """A member of a dictionary.

    Raises:
        DistapError: there is none.
    """
    if not isinstance(value, dict) or key not in value:
        raise DistapError(f"{path}: {what or 'the file'} has no {key!r}")
    return value[key]
