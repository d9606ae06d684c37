"""Values that ranks share through their store: JSON under an HMAC by the secret of the run.

Whoever reaches the store can write to it. So a value that lacks the HMAC or is of another form
counts as missing, and the HMAC covers the key and the processes that share it: nobody can move a
value to another key or run. Without a secret the form alone protects a value.
"""

import hmac
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from torch.distributed import Store

SECRET = "DISTAP_SECRET"  # in the environment; the same text on all hosts
DIGEST_BYTES = 64  # of SHA-256 in hexadecimal
T = TypeVar("T")


def as_utf8(text: str) -> str:
    """Escape what UTF-8 cannot write, as names of files in another encoding have it in Python."""
    return text.encode("utf-8", "backslashreplace").decode()


def secret_of_run() -> bytes:
    """Return the secret of the environment; empty if it has none."""
    return os.environ.get(SECRET, "").encode()


class SharedValues(Generic[T]):
    """Values of one type in a store, which the processes that `scope` names share."""

    def __init__(self, kind: Any, store: Store, secret: bytes, scope: str) -> None:
        self._adapter = _adapter_of(kind)
        self._store = store
        self._secret = secret
        self._scope = scope

    def write(self, key: str, value: T) -> None:
        self._store.set(key, self._signed(key, value))

    def propose(self, key: str, value: T) -> None:
        """Write a value unless the key has a valid one."""
        present = self._store.get(key) if self._store.check([key]) else b""
        if self._opened(key, present) is None:
            # The first proposal stays: whoever comes second finds another value than the one it has
            # looked at.
            self._store.compare_set(key, present, self._signed(key, value))  # type: ignore[arg-type]  # takes bytes too

    def read(self, keys: Sequence[str]) -> list[T | None]:
        """Return the value of each key; None for a value that is missing, forged or malformed."""
        # To `get` a missing key waits for it, and `check` answers at once.
        present = [*keys]
        if not self._store.check(present):
            present = [key for key in keys if len(keys) > 1 and self._store.check([key])]
        texts = dict(zip(present, self._store.multi_get(present), strict=True)) if present else {}
        return [self._opened(key, texts.get(key, b"")) for key in keys]

    def is_foreign(self, key: str) -> bool:
        """Return whether the key has a value that is forged or malformed."""
        return self._store.check([key]) and self.read([key]) == [None]

    def _signed(self, key: str, value: T) -> Any:
        text = self._adapter.dump_json(value)
        return self._digest(key, text) + text

    def _opened(self, key: str, signed: bytes) -> T | None:
        digest_bytes = DIGEST_BYTES if self._secret else 0
        digest = signed[:digest_bytes]
        text = signed[digest_bytes:]
        if not hmac.compare_digest(digest, self._digest(key, text)):
            return None
        try:
            return self._adapter.validate_json(text)
        except ValidationError:
            return None

    def _digest(self, key: str, text: bytes) -> bytes:
        if not self._secret:
            return b""
        # A zero byte stands in no part, so that the parts cannot run into each other.
        message = b"\0".join((self._scope.encode(), key.encode(), text))
        return hmac.new(self._secret, message, "sha256").hexdigest().encode()


@cache  # it takes milliseconds to make
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
