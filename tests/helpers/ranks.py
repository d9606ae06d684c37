"""Run functions on real gloo ranks, forked from a server that has imported distap and done nothing
else.
"""

import gc
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from distap.processes.forks import die_with_parent
from distap.world import World, joined_world

HELPERS = Path(__file__).parent


def skip_if_fast(item: str) -> None:
    """Skip the present test under `launch/test --fast`, which starts no processes."""
    if "DISTAP_FAST_TESTS" in os.environ:
        pytest.skip(f"starts {item}, which --fast leaves out")


def server() -> ForkServerContext:
    """The server that forks processes which have imported distap already."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    path = os.pathsep.join(map(str, (HELPERS, HELPERS.parents[1])))
    with patch.dict(os.environ, PYTHONPATH=path):  # of a server that has yet to start
        forkserver.ensure_running()
    return context


def on_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 300,
    joins: bool = True,
) -> list[Any]:
    """Call function(world, *arguments) on `size` ranks and return their results in the order of
    ranks.

    The function must be at the top level of a test module. An error on a rank is raised here.
    Without `joins` the ranks have torchrun's environment, but have not met, and `world` is that of
    a lone process.
    """
    skip_if_fast("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = server()
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in range(size)), strict=True)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    environment = dict(os.environ) | environment | {"WORLD_SIZE": str(size)}
    group = context.Process(target=_fork, args=(theirs, environment, joins, function, arguments))
    group.start()
    for pipe in theirs:
        pipe.close()
    try:
        answers = [_answer(pipe, timeout) for pipe in ours]
    finally:
        group.join(60)
        group.kill()
    failures = [answer for answer in answers if isinstance(answer, RankFailedError)]
    if failures:
        raise RankFailedError("\n".join(str(failure) for failure in failures))
    return answers


class RankFailedError(Exception):
    """What went wrong on a rank, with its traceback."""


def _answer(pipe: Connection, timeout: float) -> Any:
    try:
        return (
            pickle.loads(pipe.recv_bytes())
            if pipe.poll(timeout)
            else RankFailedError("a rank did not answer")
        )
    except EOFError:
        return RankFailedError("a rank ended without an answer")


def _fork(pipes: Sequence[Connection], *arguments: Any) -> None:
    """Fork the ranks from a process that has imported what their function needs, once for all."""
    for rank in range(len(pipes)):
        get_context("fork").Process(
            target=_run, args=(os.getpid(), rank, pipes, *arguments)
        ).start()
    for pipe in pipes:
        pipe.close()


def _run(
    parent: int,
    rank: int,
    pipes: Sequence[Connection],
    environment: dict[str, str],
    joins: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    die_with_parent(parent)
    gc.freeze()  # or a collection would copy all memory of the server
    for pipe in pipes[:rank] + pipes[rank + 1 :]:  # whose end tells that their ranks have left
        pipe.close()
    os.environ.clear()  # of the server, as it was when that started
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    answer: Any
    try:
        with joined_world(timeout_seconds=120) if joins else nullcontext(World()) as world:
            assert isinstance(world, World)
            answer = function(world, *arguments)
    except Exception:
        answer = RankFailedError(f"rank {rank}:\n{traceback.format_exc()}")
    # Plain bytes: tensors sent as such would live in memory that goes away with the rank.
    pipes[rank].send_bytes(pickle.dumps(answer))
