"""An unpickler that runs no code of the file it reads.

A pickle names classes and functions and calls them, so a plain `pickle.load` can do whatever Python can.
"""

import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn


class ForbiddenGlobalError(pickle.UnpicklingError):
    """The pickle names a class or function outside the table; the message is that name."""


class RestrictedUnpickler(pickle.Unpickler):
    """Look every class and function up in a table instead of importing it.

    Args:
        file: the pickle.
        allowed: what stands for each (module, name) that the pickle may use; all others are refused.
        encoding: of strings that Python 2 wrote.
    """

    def __init__(self, file: BinaryIO, allowed: Mapping[tuple[str, str], Any], encoding: str = "ASCII") -> None:
        super().__init__(file, encoding=encoding)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return what the table has for a name."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise ForbiddenGlobalError(f"{module}.{name}") from None

    def persistent_load(self, identifier: Any) -> NoReturn:
        """Refuse references to other files."""
        raise pickle.UnpicklingError("reference to something outside the file")
