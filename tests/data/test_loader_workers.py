import gc
import os
import select
import signal
import time
from multiprocessing import active_children, get_context
from pathlib import Path

import numpy as np
import pytest
from images import indexed_images, started
from launching import Program, output_of
from launching import started as launched
from raising import raises

from distap.data.shards.index import load_index
from distap.data.shards.parallel import Fetch, LostWorkerError, in_processes
from distap.data.sizing import PixelSettings
from distap.errors import DistapError


def test_a_worker_that_is_stuck_ends_with_its_rank_as_well(shards, tmp_path):
    waiting = STUCK + "print(active_children()[0].pid)\nsignal.pause()"
    with launched(Program(("-c", waiting, str(shards))), tmp_path) as rank:
        rank.wait_until(lambda: rank.said.endswith("\n"))
        worker = os.pidfd_open(int(rank.said))
        rank.process.kill()
        assert select.select([worker], [], [], 300)[0], "still there"
        os.close(worker)


def test_workers_go_on_reading_when_the_process_group_is_asked_to_end(shards):
    shares, _ = started(shards)
    workers = active_children()
    assert len(workers) == 2
    for number in (signal.SIGTERM, signal.SIGINT):
        for worker in workers:
            os.kill(worker.pid, number)
    assert sum(share.images(slice(0, 6)).shape[0] for share in shares) == 6 * 19


def test_a_worker_that_is_killed_is_an_error_that_says_why_that_may_be(shards):
    shares, _ = started(shards)
    with raises("run.lost_worker", "-9", "data.workers"):
        for worker in active_children():
            worker.kill()
        for share in shares:
            share.images(slice(0, 6))


def test_an_error_in_a_worker_says_what_it_says_in_the_rank(shards):
    messages = []
    ready = [indexed_images(shards, workers=workers) for workers in range(2)]
    (shards / str(ready[0].index.shard_name[0])).unlink()
    for images in ready:
        shares = images.shares(range(1))
        with pytest.raises(DistapError) as error:
            next(shares).images(slice(0, 6))
        messages.append(str(error.value))
    assert str(shards) in messages[0]
    assert messages[0] == messages[1]


def wait_for_no_worker():
    while active_children():  # a killed one is there until the kernel has ended it
        time.sleep(0.01)


def open_files():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_neither_loaders_nor_spools_leave_files_open(shards, tmp_path):
    counts = []
    for _ in range(3):
        shares, share = started(shards, steps=2, pixels=PixelSettings(0, tmp_path))
        next(shares).images(slice(0, 6))
        del shares, share
        wait_for_no_worker()
        counts.append(open_files())
    assert counts[0] == counts[1] == counts[2]


# Someone whose only worker is stuck in reading: the second shard is a pipe that no one writes to.
STUCK = """
import os, signal, sys
from multiprocessing import active_children, get_context
from pathlib import Path
from distap.data.shards.index import load_index
from distap.data.images.whole_images import sized_chunks
from distap.data.sizing import Sizing
from distap.data.loading.reader import ImageSet

folder = Path(sys.argv[1])
index = load_index(folder)
shard = folder / str(index.shard_name[1])
shard.unlink()
os.mkfifo(shard)
samples = [[sample] for sample in range(9)]
chunks = sized_chunks(ImageSet(folder, index), Sizing("crop", 16), {}, samples, 1, 1)
for _ in range(4):
    next(chunks)
"""


def test_a_worker_that_is_stuck_does_not_keep_its_rank(shards, tmp_path):
    with launched(Program(("-c", STUCK, str(shards))), tmp_path) as rank:
        assert rank.status() == 0, rank.said


def test_workers_that_hand_nothing_over_are_lost_after_a_while_and_what_they_read_is_named(
    shards, capfd
):
    index = load_index(shards)
    shard = shards / str(index.shard_name[1])
    images = indexed_images(shards, workers=2, longest_wait=2.0)
    shard.unlink()
    os.mkfifo(shard)  # a pipe that no one writes to, as storage that hangs
    shares = images.shares(range(20))
    with raises("run.lost_worker", "2", kind=LostWorkerError) as raised:
        for share in shares:
            share.images(slice(0, 6))
    assert shard.name in str(raised.value)
    wait_for_no_worker()
    stacks = capfd.readouterr().err  # of all threads of the worker
    assert "Thread 0x" in stacks and "most recent call first" in stacks
    assert "Fatal" not in stacks  # an abort, which may dump core


def _unpicklable(request):
    return lambda: request


def _numbered(size):
    return np.full((2, size), size % 251)


def test_an_item_that_cannot_be_handed_over_ends_its_worker_and_is_not_waited_for():
    for read, message in (
        (_unpicklable, "ended with status 1"),
        (lambda _: [0] * 2**60, "lost: memory ran out"),
    ):
        with pytest.raises(LostWorkerError, match=message):
            list(in_processes(read, [7], workers=1, prefetch=1, lends=True))


NO_SHARED_MEMORY = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,ro", "tmpfs", "/dev/shm"], check=True)
from pathlib import Path
from images import started
share = started(Path(sys.argv[1]), workers=2)[1]
print(share.images(slice(0, 6)).shape)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have an own /dev/shm")
def test_workers_need_neither_shared_memory_nor_a_short_path_for_sockets(shards, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    output = output_of(Program(("-c", NO_SHARED_MEMORY, str(shards))), tmp_path, TMPDIR=str(folder))
    assert output.startswith("torch.Size([6, 3, ")


def test_an_array_is_valid_until_the_next_is_asked_for_and_grows():
    sizes = [0, 3, 2**20, 5, 2**21, 7] * 3
    for size, array in zip(
        sizes, in_processes(_numbered, sizes, workers=2, prefetch=1, lends=True), strict=True
    ):
        assert array.shape == (2, size) and (array == size % 251).all() and array.flags.writeable


@pytest.mark.parametrize("count", [1, 3, 9, 30])
def test_what_is_fetched_ahead_computes_no_more_answers_than_there_is_room_for(count):
    computed = get_context("fork").Value("i", 0)

    def compute(size, data):
        assert data == -size
        with computed:
            computed.value += 1
        return np.full(1000, size)

    results = in_processes(
        compute,
        range(count),
        workers=1,
        prefetch=2,
        lends=True,
        fetch=Fetch(lambda size: -size, ahead=8),
    )
    for number, array in enumerate(results):
        while computed.value < min(count, number + 2):
            time.sleep(0.001)
        # Two wait, and one is being used.
        assert computed.value <= number + 3
        assert (array == number).all()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_fetch_that_fails_fails_in_its_turn(workers):
    def fetch(number):
        if number == 5:
            raise DistapError("storage.refused", "the fifth cannot be read")
        return number

    results = in_processes(
        lambda number, data: number + data, range(9), workers, fetch=Fetch(fetch, ahead=3)
    )
    assert [next(results) for _ in range(5)] == [0, 2, 4, 6, 8]
    with raises("storage.refused", "fifth"):
        next(results)
