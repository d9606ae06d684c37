"""Read pickles of data sets without running code: containers, numbers, texts and numpy arrays only.

Each numpy name in such a pickle is replaced by a stand-in below, which keeps data and does nothing else. A pickle
with any other name is refused.
"""

import math
import pickle
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from distap.errors import DistapError, problems_of

PLAIN_TYPE = re.compile(r"[?biuf]\d{1,2}|\?|[SUO]\d{0,9}")


Name = Annotated[str, Field(pattern=r"^[!-~]+$")]  # without spaces
Kind = TypeVar("Kind", bound=BaseModel)


def read_plain_pickle(path: Path, kind: type[Kind]) -> Kind:
    """Read a pickle into a model of pydantic; raise a DistapError that names the file and the place of a problem."""
    try:
        return kind.model_validate(plain_value(path))
    except ValidationError as error:
        raise DistapError(f"{path}: {problems_of(error.errors()[:1])[0]}") from error


class PlainUnpickler(pickle.Unpickler):
    """Look every name up in STAND_INS; `pickle.load` would import and call whatever a pickle names.

    numpy's own classes are none of them: dtype lets a pickle set flags with which the bytes of an array are taken for
    pointers to objects, which would run what they point to.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            # Older pickles have older names of the same modules.
            return STAND_INS[module.replace("numpy.core", "numpy._core").replace("__builtin__", "builtins"), name]
        except KeyError:
            problem = f"it names {module}.{name}. Nothing of it was run: get it from its authors"
            raise pickle.UnpicklingError(problem) from None


def plain_value(path: Path) -> Any:
    """Read a pickle of plain data; raise a DistapError if it is unreadable, damaged, or names other classes."""
    try:
        with path.open("rb") as file:
            # Python 2 wrote bytes as strings, which are read as Latin-1.
            return PlainUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle can fail in any way
        raise DistapError(f"{path}: not a readable pickle of plain data: {error}") from error


class _Type:
    """Stand-in for numpy.dtype, of numbers, texts and lists only."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not PLAIN_TYPE.fullmatch(code):
            raise pickle.UnpicklingError(f"array of type {code!r:.60}")
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def values(self, data: Any, shape: Any = (1,), columns_first: bool = False) -> list[Any]:
        """Return an array's values, row after row."""
        if not self.code.startswith("O"):
            raw = data.encode("latin1") if isinstance(data, str) else data
            data = np.frombuffer(raw, np.dtype(self.order + self.code)).tolist()
        if len(data) != math.prod(shape) or (columns_first and len(shape) > 1):
            raise pickle.UnpicklingError(f"array of shape {shape!r:.60} with {len(data)} values")
        return list(data)


class _Array(list[Any]):
    """Stand-in for a numpy array: a list of its values."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, data = state
        self[:] = kind.values(data, shape, columns_first)


def _encode(text: Any, encoding: Any) -> bytes:
    """Stand-in for _codecs.encode, with which protocol 2 writes bytes; other codecs would run code."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding!r:.60}")
    return str(text).encode("latin1")


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # which pickles name but never call
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): lambda: b"",  # protocol 2 writes the bytes of an empty array as such a call
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "scalar"): lambda kind, data: kind.values(data)[0],
    ("numpy._core.numeric", "_frombuffer"): lambda data, kind, shape, order: kind.values(data, shape, order == "F"),
}
