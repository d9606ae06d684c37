"""Many ranges read at once, against each of them read alone."""

import itertools
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from raising import raises
from servers import s3_files, web_server

from distap.errors import AnswerError
from distap.processes.forks import forking_context
from distap.storage import files, remotes
from distap.storage.files import COALESCED, Storage
from distap.storage.ranges import Range, coalesced
from distap.storage.remotes import MissingFileError, UnreachableError

SCHEMES = ["http", "s3", "gs"]
SIZE = 2**20
SPARSE = [Range("a", 2 * COALESCED * number, 100) for number in range(8)]  # a request each


@pytest.fixture
def content(tmp_path):
    """Bytes of the files `a` and `b`, by name."""
    content = {name: random.Random(name).randbytes(SIZE) for name in "ab"}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    return content


@pytest.fixture
def store(content, tmp_path):
    with web_server(tmp_path) as server:
        yield server


def random_ranges(count, seed):
    """Ranges of both files in random order, some of them empty, equal, or at the end."""
    rng = random.Random(seed)
    ranges = []
    for _ in range(count):
        offset = rng.randrange(SIZE)
        ranges.append(Range(rng.choice("ab"), offset, rng.choice([0, 1, 999, 30_000, 200_000])))
    return [*ranges, Range("a", SIZE - 5, 5), *ranges[:5]]


def expected(content, ranges):
    return [content[name][offset : offset + size] for name, offset, size in ranges]


@pytest.mark.parametrize("gap", [0, 10, 100])
@pytest.mark.parametrize("longest", [50, 300])
def test_requests_cover_their_ranges_within_both_limits(gap, longest):
    rng = random.Random(gap + longest)
    ranges = [
        Range(rng.choice("ab"), rng.randrange(2000), rng.choice([0, 1, 20, 80])) for _ in range(99)
    ]
    requests = coalesced(ranges, gap, longest)
    numbers = [number for request in requests for number in request.numbers]
    assert sorted(numbers) == [number for number, part in enumerate(ranges) if part.size]
    for whole, numbers in requests:
        members = [ranges[number] for number in numbers]
        assert {part.name for part in members} == {whole.name}
        assert min(part.offset for part in members) == whole.offset
        assert max(part.end for part in members) == whole.end
        assert whole.size <= max(longest, *(part.size for part in members))
        covered = {place for part in members for place in range(part.offset, part.end)}
        assert whole.size - len(covered) <= gap * (len(members) - 1)
    for (left, _), (right, _) in itertools.pairwise(requests):
        if left.name == right.name:
            end = max(left.end, right.end)
            assert right.offset - left.end > gap or end - left.offset > longest


@pytest.mark.parametrize("scheme", ["file", *SCHEMES])
def test_many_ranges_are_those_read_alone(scheme, store, content, tmp_path):
    storage = Storage(str(tmp_path)) if scheme == "file" else store.storage(scheme)
    ranges = random_ranges(60, seed=1)
    assert storage.read_many(ranges) == expected(content, ranges)
    assert storage.meter["retries"] == sum(
        part.end > SIZE for part in ranges if scheme != "file" and part.size
    )
    assert storage.read_many([]) == []
    assert storage.read_many([Range("none", 7, 0)]) == [b""]


def test_an_object_store_sends_many_ranges(s3, content, tmp_path):
    s3_files().put(f"{tmp_path}/", "s3://shards/ranges/", recursive=True)
    storage = Storage("s3://shards/ranges")
    ranges = [part for part in random_ranges(60, seed=2) if part.end <= SIZE]
    assert storage.read_many(ranges) == expected(content, ranges)
    assert storage.meter["retries"] == 0


def test_neighbours_share_a_request_and_the_bytes_between_are_counted(store, content):
    storage = store.storage("http")
    ranges = [
        Range("a", 500_000, 10),
        Range("a", 0, 10),
        Range("a", COALESCED + 10, 10),
        Range("b", 0, 10),
        Range("a", 2 * COALESCED + 21, 10),  # a byte too far
    ]
    assert storage.read_many(ranges) == expected(content, ranges)
    asked = [
        f"/a bytes=0-{COALESCED + 19}",
        f"/a bytes={2 * COALESCED + 21}-{2 * COALESCED + 30}",
        "/a bytes=500000-500009",
        "/b bytes=0-9",
    ]
    assert sorted(store.requests) == asked
    read = COALESCED + 20 + 30
    assert storage.meter == Counter(requests=4, read_bytes=read, used_bytes=50)


def test_a_shared_request_has_no_more_bytes_than_one_of_a_whole_file(store, content, monkeypatch):
    monkeypatch.setattr(files, "REQUEST_BYTES", 1000)
    ranges = [Range("a", 100 * number, 100) for number in range(25)] + [Range("b", 0, 5000)]
    storage = store.storage("http")
    assert storage.read_many(ranges) == expected(content, ranges)
    asked = ["/a bytes=0-999", "/a bytes=1000-1999", "/a bytes=2000-2499", "/b bytes=0-4999"]
    assert sorted(store.requests) == asked


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_requests_are_under_way_at_once(scheme, store, content, monkeypatch):
    monkeypatch.setattr(remotes, "TIMEOUT_SECONDS", 20)  # of a test that fails
    ranges = [
        Range(name, 2 * COALESCED * number, 100) for number in range(8) for name in ("a", "b")
    ]
    store.faults = ["late"] * (len(ranges) - 1) + ["release"]
    assert store.storage(scheme).read_many(ranges) == expected(content, ranges)
    assert store.asked() == len(ranges)


def test_no_more_requests_are_under_way_than_allowed(store, content, monkeypatch):
    monkeypatch.setattr(remotes, "TIMEOUT_SECONDS", 1)
    storage = store.storage("http")
    # The third request, which would release the others, is sent once they were given up.
    store.faults = ["late", "late", "release"]
    assert storage.read_many(SPARSE, requests=2) == expected(content, SPARSE)
    assert storage.meter["retries"] == 2


def test_a_slow_answer_keeps_no_other_waiting(store, content):
    store.faults = ["late", *[""] * (len(SPARSE) - 2), "release"]
    storage = store.storage("http")
    assert storage.read_many(SPARSE, requests=2) == expected(content, SPARSE)
    assert storage.meter["retries"] == 0


FAULTS = [
    *[(scheme, fault) for scheme in ("http", "s3") for fault in ("503", "cut")],  # gcsfs retries
    *[(scheme, fault) for scheme in SCHEMES for fault in ("short", "elsewhere")],
]


@pytest.mark.parametrize(("scheme", "fault"), FAULTS)
def test_what_fails_or_is_cut_is_read_alone(scheme, fault, store, content):
    storage = store.storage(scheme)
    ranges = [*SPARSE, Range("a", 150, 50)]  # the first request has two
    store.faults = [fault]
    assert storage.read_many(ranges) == expected(content, ranges)
    assert storage.meter["retries"] == 1
    assert store.asked() in (len(SPARSE) + 1, len(SPARSE) + 2)


def test_a_server_that_fails_now_and_then_is_read_to_the_end(store, content):
    rng = random.Random(3)
    store.faults = [
        rng.choice(["503", "cut", "short"]) if rng.random() < 0.05 else "" for _ in range(400)
    ]
    faults = sum(map(bool, store.faults[:100]))
    storage = store.storage("http")
    ranges = [
        Range(name, 2 * COALESCED * number + shift, 50)
        for shift in range(13)
        for number in range(8)
        for name in ("a", "b")
    ]
    for start in range(0, len(ranges), 16):
        part = ranges[start : start + 16]
        assert storage.read_many(part) == expected(content, part)
    assert faults > 2
    assert storage.meter["retries"] >= faults
    assert storage.meter["used_bytes"] == 50 * len(ranges)


def test_a_fault_that_stays_is_the_error_of_a_single_read(store, monkeypatch):
    monkeypatch.setattr(remotes, "ATTEMPTS", 2)
    store.faults = ["503"] * 99
    with raises("storage.unreachable", f"{store.url}/a", "2", kind=UnreachableError):
        store.storage("http").read_many(SPARSE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_that_is_missing_is_named(scheme, store):
    with raises("storage.missing", f"{store.base(scheme)}/none", kind=MissingFileError):
        store.storage(scheme).read_many([*SPARSE, Range("none", 0, 9)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_ignores_ranges_is_refused(scheme, store):
    store.ranges = False
    with raises("storage.bad_answer", "a", kind=AnswerError):
        store.storage(scheme).read_many(SPARSE)


def test_credentials_that_are_missing_are_an_error(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with raises("storage.refused", "s3://shards/a"):
        Storage("s3://shards").read_many(SPARSE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_redirect_elsewhere_is_refused(scheme, store, tmp_path):
    with web_server(tmp_path) as inner:
        store.faults = [inner.url] * 99
        with raises("storage.bad_redirect", "DISTAP_REDIRECTS"):
            store.storage(scheme).read_many(SPARSE)
        assert not inner.requests


@pytest.mark.parametrize("scheme", SCHEMES)
def test_threads_share_a_storage_and_its_counts(scheme, store, content):
    storage = store.storage(scheme)
    jobs = [[part for part in random_ranges(20, seed) if part.end <= SIZE] for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(storage.read_many, jobs))
    assert answers == [expected(content, job) for job in jobs]
    used = sum(part.size for job in jobs for part in job)
    assert storage.meter["used_bytes"] == used
    assert storage.meter["requests"] == store.asked()


def test_a_process_that_is_forked_while_threads_read_can_read(store, content):
    storage = store.storage("http")

    def read_once():
        sys.exit(storage.read_many(SPARSE) != expected(content, SPARSE))

    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(storage.read_many, SPARSE) for _ in range(20)]
        process = forking_context().Process(target=read_once)
        process.start()
        assert all(job.result() == expected(content, SPARSE) for job in reading)
    process.join()
    assert process.exitcode == 0
