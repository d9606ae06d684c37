"""An unpickler that runs no code of the file it reads, where `pickle.load` would call whatever a pickle names."""

import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn


class ForbiddenGlobalError(pickle.UnpicklingError):
    """The pickle names a class or function outside the table; the message is that name."""


class RestrictedUnpickler(pickle.Unpickler):
    """Look every (module, name) up in `allowed` instead of importing it; `encoding` is of strings from Python 2."""

    def __init__(self, file: BinaryIO, allowed: Mapping[tuple[str, str], Any], encoding: str = "ASCII") -> None:
        super().__init__(file, encoding=encoding)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise ForbiddenGlobalError(f"{module}.{name}") from None

    def persistent_load(self, identifier: Any) -> NoReturn:
        raise pickle.UnpicklingError("reference to something outside the file")
