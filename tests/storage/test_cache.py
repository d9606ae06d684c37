"""Whole files of a store on a host's disk, which processes of several trainings share."""

import errno
import hashlib
import os
import random
import signal
from contextlib import ExitStack, closing, suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
from raising import raises

from distap.storage.cache import FileCache

CONTENTS = [bytes([number]) * 1000 for number in range(6)]
NAMES = [hashlib.sha256(content).hexdigest() for content in CONTENTS]


class Store:
    """Gives files in blocks, and counts how often each was read."""

    def __init__(self):
        self.reads = []

    def fetch(self, cache, number, content=None):
        def blocks():
            self.reads.append(number)
            data = CONTENTS[number] if content is None else content
            yield data[:300]
            yield data[300:]

        return cache.fetch(NAMES[number], 1000, blocks)


@pytest.fixture
def cache_of(tmp_path):
    """Open the cache with room for so many bytes."""
    with ExitStack() as stack:

        def opened(limit):
            return stack.enter_context(closing(FileCache(tmp_path, limit)))

        yield opened


def present(cache):
    return [number for number, name in enumerate(NAMES) if cache.has(name)]


def content_of(cache, number):
    with cache.open(NAMES[number]) as file:
        return file.read()


def test_a_file_is_fetched_once(tmp_path):
    store = Store()
    cache = FileCache(tmp_path / "new" / "cache", 2000)
    assert cache.open(NAMES[0]) is None
    assert store.fetch(cache, 0)
    assert store.fetch(FileCache(tmp_path / "new" / "cache", 2000), 0)
    assert store.reads == [0]
    assert content_of(cache, 0) == CONTENTS[0]
    assert {path.name for path in cache.folder.iterdir()} == {NAMES[0], ".room"}


def test_files_that_no_one_wants_make_room_first_and_then_those_wanted_last(cache_of):
    store = Store()
    cache = cache_of(3000)
    for number in (0, 1, 2):
        assert store.fetch(cache, number)
    cache.want([NAMES[number] for number in (3, 0, 4, 2, 5)])
    assert store.fetch(cache, 3) and present(cache) == [0, 2, 3]
    assert store.fetch(cache, 4) and present(cache) == [0, 3, 4]
    # The others are wanted sooner than this one.
    assert not store.fetch(cache, 5) and present(cache) == [0, 3, 4]
    assert store.reads == [0, 1, 2, 3, 4]


def test_a_file_that_is_wanted_by_no_one_removes_none_that_is(cache_of):
    cache = cache_of(1000)
    store = Store()
    cache.want([NAMES[0]])
    assert store.fetch(cache, 0)
    assert not store.fetch(cache, 1)


def test_a_file_larger_than_the_cache_stays_in_the_store(cache_of):
    store = Store()
    assert not store.fetch(cache_of(999), 0)
    assert store.reads == []


def test_an_open_file_can_be_read_to_its_end_after_it_was_removed(cache_of):
    store = Store()
    cache = cache_of(1000)
    store.fetch(cache, 0)
    with cache.open(NAMES[0]) as file:
        assert store.fetch(cache, 1) and present(cache) == [1]
        assert file.read() == CONTENTS[0]


def test_bytes_that_a_network_changed_are_fetched_again(cache_of):
    cache = cache_of(3000)
    answers = [CONTENTS[1], CONTENTS[0]]
    assert cache.fetch(NAMES[0], 1000, lambda: iter([answers.pop(0)]))
    assert content_of(cache, 0) == CONTENTS[0]


def test_a_store_with_other_bytes_is_refused_once_and_told(cache_of, caplog):
    store = Store()
    cache = cache_of(3000)
    assert not store.fetch(cache, 0, content=CONTENTS[1])
    assert not store.fetch(cache, 0, content=CONTENTS[1])
    assert store.reads == [0, 0]
    assert "data check" in caplog.text and NAMES[0] in caplog.text
    # A new training tries again.
    assert store.fetch(cache_of(3000), 0)


def test_an_error_of_the_store_leaves_nothing_behind(cache_of, tmp_path):
    cache = cache_of(3000)

    def blocks():
        yield b"beginning"
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError, match="gone"):
        cache.fetch(NAMES[0], 1000, blocks)
    assert [path.name for path in tmp_path.iterdir()] == [".room"]


def test_a_full_disk_is_told_once_and_loses_nothing(cache_of, tmp_path, caplog, monkeypatch):
    def fallocate(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store()
    cache = cache_of(3000)
    assert store.fetch(cache, 0)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    assert not store.fetch(cache, 1) and not store.fetch(cache, 2)
    assert caplog.text.count("No space left") == 1
    assert content_of(cache, 0) == CONTENTS[0]
    assert {path.name for path in tmp_path.iterdir()} == {NAMES[0], ".room"}


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with raises("storage.cannot_write", "data.cache.folder", str(tmp_path / "file")):
        FileCache(tmp_path / "file" / "cache", 1000)


def in_process(function, *arguments):
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def fetch_slowly(folder, started, goes_on):
    def blocks():
        yield CONTENTS[0][:300]
        started.set()
        goes_on.wait(60)
        yield CONTENTS[0][300:]

    FileCache(folder, 3000).fetch(NAMES[0], 1000, blocks)


@pytest.fixture
def writer(tmp_path):
    """A process that is writing the first file, and an event for it to go on."""
    started, goes_on = (get_context("fork").Event() for _ in range(2))
    process = in_process(fetch_slowly, tmp_path, started, goes_on)
    assert started.wait(60)
    yield process, goes_on
    process.kill()
    process.join()


def test_a_file_that_another_process_writes_is_waited_for(cache_of, writer):
    store = Store()
    _, goes_on = writer
    cache = cache_of(3000)
    assert not cache.has(NAMES[0])
    goes_on.set()
    assert store.fetch(cache, 0)
    assert store.reads == [] and content_of(cache, 0) == CONTENTS[0]


def test_a_writer_that_is_killed_leaves_a_part_that_the_next_one_replaces(
    cache_of, tmp_path, writer
):
    process, _ = writer
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    store = Store()
    cache = cache_of(1000)
    # Its part holds no room either.
    assert store.fetch(cache, 1)
    assert store.fetch(cache, 0)
    assert content_of(cache, 0) == CONTENTS[0]
    assert {path.name for path in tmp_path.iterdir()} == {NAMES[0], ".room"}


def test_the_part_of_a_living_writer_holds_its_room(cache_of, writer):
    assert not Store().fetch(cache_of(1500), 1)


def want_and_wait(folder, started):
    cache = FileCache(folder, 2000)
    cache.want([NAMES[0]])
    started.set()
    signal.pause()


def test_the_files_of_another_training_stay_as_long_as_it_lives(cache_of, tmp_path):
    store = Store()
    cache = cache_of(2000)
    store.fetch(cache, 0)
    store.fetch(cache, 1)
    started = get_context("fork").Event()
    process = in_process(want_and_wait, tmp_path, started)
    assert started.wait(60)
    cache.want([NAMES[2], NAMES[3]])
    assert store.fetch(cache, 2) and present(cache) == [0, 2]
    assert not store.fetch(cache, 3)
    process.kill()
    process.join()
    assert store.fetch(cache, 3) and present(cache) == [2, 3]
    assert len(list(Path(tmp_path).glob("*.owner"))) == 1


def test_two_owners_of_one_process_both_keep_their_files(cache_of):
    store = Store()
    first = cache_of(2000)
    second = cache_of(2000)
    store.fetch(first, 0)
    store.fetch(first, 1)
    first.want([NAMES[0]])
    second.want([NAMES[1], NAMES[2]])
    assert not store.fetch(second, 2)
    first.close()
    assert store.fetch(second, 2) and present(second) == [1, 2]


def fetch_at_random(folder, seed):
    cache = FileCache(folder, 2000)
    for number in random.Random(seed).choices(range(6), k=300):
        cache.want([NAMES[number]])
        if Store().fetch(cache, number):
            with suppress(TypeError):  # None: another process has removed it meanwhile
                assert content_of(cache, number) == CONTENTS[number]


def test_no_process_reads_a_file_that_is_not_whole(tmp_path):
    processes = [in_process(fetch_at_random, tmp_path, seed) for seed in range(4)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    cache = FileCache(tmp_path, 2000)
    for number in present(cache):
        assert content_of(cache, number) == CONTENTS[number]
