"""Threads with a short queue: work that finds it full is refused at once instead of waiting for ever."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from distap.apps.serve.problems import RETRY_AFTER, RefusedError, busy

T = TypeVar("T")


class Places:
    """A number of things at a time.

    Args:
        total: of them.
        what: is told to whom finds none free.
    """

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """How many are."""
        return self._taken

    def take(self) -> None:
        """Take one.

        Raises:
            RefusedError: none is free.
        """
        with self._lock:
            if self._taken >= self._total:
                raise busy(self._what)
            self._taken += 1

    def give_back(self) -> None:
        """Give one back."""
        with self._lock:
            self._taken -= 1

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take one for as long as it is entered."""
        self.take()
        try:
            yield
        finally:
            self.give_back()


class Pool:
    """Runs calls in threads.

    Args:
        name: of the threads.
        threads: calls at a time.
        queue: calls that may wait.
        timeout_seconds: for a call, with its waiting.
    """

    def __init__(self, name: str, threads: int, queue: int, timeout_seconds: float) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._timeout = timeout_seconds
        self.places = Places(threads + queue, f"{threads + queue} searches are under way already")

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """What the call returns; a thread that is still at it keeps its place, also after the timeout.

        Raises:
            RefusedError: the queue is full, or the time is over.
        """
        self.places.take()
        try:
            future: Future[T] = self._threads.submit(call, *arguments)
        except BaseException:
            self.places.give_back()
            raise
        future.add_done_callback(lambda _: self.places.give_back())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout)
        except TimeoutError as error:
            raise RefusedError(
                503, "busy", f"it took more than {self._timeout:g} s; try again", RETRY_AFTER
            ) from error

    def close(self) -> None:
        """Wait for the calls that have begun; none begins any more."""
        self._threads.shutdown(cancel_futures=True)
