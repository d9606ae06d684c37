import os
import subprocess
import sys

import pytest
import torch
from ranks import on_ranks

from distap.distributed import World, joined_world
from distap.errors import DistapError

TOTAL = 11


def exchange(world):
    rows = torch.arange(TOTAL * 2.0).view(TOTAL, 2)
    mine = rows[world.rank :: world.size]
    flags = world.gather_rows(mine[:, 0] > 6, TOTAL)
    everything = world.gather_rows(mine, TOTAL)
    back = world.scatter_rows(rows if world.rank == 0 else None, mine, TOTAL)
    agreement = world.all_agree(True), world.all_agree(world.rank != 1)
    greatest = world.maximum(world.rank), world.maximum(float("nan") if world.rank == 1 else 0.0)
    same = world.all_same(5), world.all_same(world.rank)
    return same, everything, flags, torch.equal(back, mine), agreement, greatest, world.sum(torch.tensor(1)).item()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_are_gathered_and_scattered_in_slot_order(size):
    for same, everything, flags, is_back, agreement, greatest, ranks in on_ranks(size, exchange):
        assert torch.equal(everything, torch.arange(TOTAL * 2.0).view(TOTAL, 2))
        assert flags.tolist() == [2 * slot > 6 for slot in range(TOTAL)]
        assert is_back
        assert same == (True, size == 1)
        assert agreement == (True, size == 1)
        assert greatest == (size - 1, 0.0 if size == 1 else float("inf"))
        assert ranks == size


def test_slots_are_dealt_round_robin():
    assert [list(World(rank=r, size=3).slots(7)) for r in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_an_incomplete_environment_of_torchrun_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(DistapError, match="environment of torchrun is incomplete"), joined_world():
        pass


def test_a_lone_process_is_a_world_of_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with joined_world() as world:
        assert (world.rank, world.size) == (0, 1)
        assert not torch.distributed.is_initialized()


def test_importing_the_command_line_does_not_wait_for_torch():
    """So that --help answers at once."""
    script = "import sys, distap.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ}).returncode == 0
