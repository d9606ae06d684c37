import socket
import threading

import pytest
import torch
from raising import raises
from ranks import RankFailedError, on_ranks

from distap.errors import CollectiveError, DistapError
from distap.world import World, device_of, joined_world

TOTAL = 11


def exchange(world):
    rows = torch.arange(TOTAL * 2.0).view(TOTAL, 2)
    own_rows = rows[world.rank :: world.size]
    flags = world.gather_rows(own_rows[:, 0] > 6, TOTAL)
    everything = world.gather_rows(own_rows, TOTAL)
    back = world.scatter_rows(rows if world.rank == 0 else None, own_rows, TOTAL)
    agreement = world.all_agree(True), world.all_agree(world.rank != 1)
    greatest = world.maximum(world.rank), world.maximum(float("nan") if world.rank == 1 else 0.0)
    output = world.gather_values(["é" * world.rank, world.rank])
    return (
        output,
        everything,
        flags,
        torch.equal(back, own_rows),
        agreement,
        greatest,
        world.sum(torch.tensor(1)).item(),
    )


@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_gathered_and_scattered_in_slot_order(size):
    for output, everything, flags, is_back, agreement, greatest, ranks in on_ranks(size, exchange):
        assert torch.equal(everything, torch.arange(TOTAL * 2.0).view(TOTAL, 2))
        assert flags.tolist() == [2 * slot > 6 for slot in range(TOTAL)]
        assert is_back
        assert output == [["é" * rank, rank] for rank in range(size)]
        assert agreement == (True, size == 1)
        assert greatest == (size - 1, 0.0 if size == 1 else float("inf"))
        assert ranks == size


def refusals(world):
    """The code and the text with which ranks that disagree are refused."""
    own = DistapError("data.empty", f"no images on {world.rank}") if world.rank else None
    shared = DistapError("data.empty", "no images")
    errors = []
    for problem, kind in ((own, ()), (shared, ()), (None, [f"set {world.rank}"])):
        with pytest.raises(DistapError) as caught:
            world.agreed(problem, kind, world.rank, "data")
        errors.append((caught.value.code, str(caught.value)))
    assert world.agreed(None, ["one set"], world.rank) == list(range(world.size))
    return errors


def test_all_ranks_raise_the_code_and_the_text_of_those_with_a_problem():
    of_ranks = on_ranks(3, refusals)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert of_ranks[0] == [
        ("data.empty", "rank 1: no images on 1; rank 2: no images on 2"),
        ("data.empty", "no images"),
        (
            "ranks.differ",
            "the ranks see different data: rank 0 has set 0; rank 1 has set 1; rank 2 has set 2",
        ),
    ]


def test_slots_are_dealt_round_robin():
    assert [list(World(rank=r, size=3).slots(7)) for r in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_an_incomplete_environment_of_torchrun_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with raises("ranks.no_environment"), joined_world():
        pass
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        raises("ranks.no_environment", "MASTER_ADDR"),
        joined_world(),
    ):
        pass


def test_a_lone_process_is_a_world_of_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with joined_world() as world:
        assert (world.rank, world.size) == (0, 1)
        assert not torch.distributed.is_initialized()


def test_a_device_that_is_not_there_is_refused_with_the_versions_and_one_that_is_named_is_taken(
    monkeypatch, tmp_path
):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("distap.world.DRIVER", tmp_path / "version")
    with raises("ranks.no_gpu", "device", "GPU"):
        device_of(0, "cuda")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Thu"
    )
    with (
        raises("ranks.no_gpu", "570.86.10"),
        joined_world(wanted="cuda"),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [device_of(0, wanted).type for wanted in ("auto", "cuda", "cpu")] == [
        "cuda",
        "cuda",
        "cpu",
    ]


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        message = rf"store at 127.0.0.1:{port} .* cannot be reached within 1 s"
        with pytest.raises(CollectiveError, match=message), joined_world(timeout_seconds=1):
            pass


def leave_early(world):
    world.barrier()  # the ranks are connected
    world.note("gather of step 7")
    if world.rank == 0:
        raise DistapError("data.missing", "the data are gone")
    world.barrier()


def test_a_rank_that_leaves_with_an_error_is_quoted_by_the_others():
    quoted = (
        r"rank 1: barrier \(gather of step 7\) failed: rank 0 \(.*\) left: DistapError: the data"
        r" are gone"
    )
    with pytest.raises(RankFailedError, match=quoted):
        on_ranks(2, leave_early)


def test_no_thread_outlives_the_world(monkeypatch):
    def threads():
        return {
            thread.name for thread in threading.enumerate() if thread.name.startswith("distap-")
        }

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    before = threads()  # of a logger that another test left hanging
    with joined_world(timeout_seconds=20) as world:
        assert world.size == 1
        assert {"distap-beat", "distap-judge"} <= threads()
    assert threads() == before
