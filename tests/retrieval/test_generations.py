"""Generations of an index: rows added and removed, and writers that are killed."""

import os
import signal
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from postprocessing_reference import clustered
from raising import raises

from distap.retrieval import generations
from distap.retrieval.changing import changed_index
from distap.retrieval.generations import updating
from distap.retrieval.indexing import build_index, search_index
from distap.retrieval.joining import taken_images
from distap.retrieval.stored_index import read_index, write_index, write_next

# Events of Python's audit, at each of which a writer is killed.
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
REMOVED = np.array([3, 4, 100, 399])


@pytest.fixture(scope="module")
def gallery():
    images = clustered(420, 16, 20)
    checksums = np.arange(1, 421, dtype=np.uint64)
    return replace(images, columns={"size": np.arange(420).astype(str)}, checksums=checksums)


def part(gallery, rows):
    images = taken_images(gallery, np.asarray(rows))
    return replace(images, descriptors=np.array(images.descriptors[:]))


def answers(index, queries, **options):
    return [
        [(hit.key, round(hit.similarity, 5), hit.columns) for hit in hits]
        for hits in index.search(queries, 7, **options)
    ]


def update(folder, gallery):
    index = read_index(folder, changeable=True)
    with updating(folder):
        return write_next(folder, changed_index(index, REMOVED, part(gallery, range(400, 420))))


@pytest.mark.parametrize(
    ("kind", "search"),
    [
        ("flat", ""),
        ("hnsw", "efSearch=500"),
        ("IVF8,Flat", "nprobe=8"),
        ("SQfp16", ""),
        ("IVF4,PQ4x4np,Refine(Flat)", "nprobe=4,k_factor_rf=200"),
    ],
)
def test_an_index_with_rows_added_and_removed_answers_as_one_built_anew(
    tmp_path, gallery, kind, search
):
    write_index(tmp_path, build_index(part(gallery, range(400)), kind, search))
    changed = update(tmp_path, gallery)
    kept = np.setdiff1d(np.arange(420), REMOVED)
    anew = build_index(part(gallery, kept), kind, search)
    queries = gallery.descriptors[::17]
    for options in ({}, {"where": "size<300"}):
        expected = answers(anew, queries, **options)
        assert answers(changed, queries, **options) == expected
        assert answers(read_index(tmp_path), queries, **options) == expected
    assert changed.about["index"] == read_index(tmp_path).about["index"]
    assert sorted(changed.keys.tolist()) == sorted(anew.keys.tolist())
    assert changed.generation == "000002"

    # Numbers of removed rows do not come back.
    index = read_index(tmp_path, changeable=True)
    with updating(tmp_path):
        again = write_next(tmp_path, changed_index(index, np.array([0]), part(gallery, REMOVED)))
    anew = build_index(part(gallery, np.arange(1, 420)), kind, search)
    assert answers(again, queries) == answers(anew, queries)
    assert sorted(path.name for path in (tmp_path / "generations").iterdir()) == [
        "000002",
        "000003",
    ]


def test_an_update_that_leaves_no_image_is_refused(gallery):
    with raises("index.empty", "no image left"):
        changed_index(build_index(gallery, "flat"), np.arange(420), None)


def test_a_second_update_at_the_same_time_is_refused(tmp_path):
    with updating(tmp_path), raises("index.locked", str(tmp_path)), updating(tmp_path):
        pass


def test_an_index_of_an_earlier_distap_is_refused_by_name(tmp_path):
    (tmp_path / "about.json").write_text("{}")
    with raises("index.old_layout", str(tmp_path), "distap index"):
        read_index(tmp_path)


def killed_at(number, work):
    """Whether a fork that does the work is killed at an event, before the work is done."""
    child = os.fork()
    if child == 0:
        events = 0

        def count(event, arguments):
            nonlocal events
            if event not in EVENTS:
                return
            events += 1
            if events > number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_an_update_that_is_killed_anywhere_leaves_one_whole_generation(tmp_path, gallery):
    write_index(tmp_path, build_index(part(gallery, range(400)), "flat"))
    queries = gallery.descriptors[::50]
    before = answers(read_index(tmp_path), queries)
    after = answers(
        build_index(part(gallery, np.setdiff1d(np.arange(420), REMOVED)), "flat"), queries
    )
    kills = 0
    while killed_at(2 * kills, partial(update, tmp_path, gallery)):
        kills += 1
        index = read_index(tmp_path)
        assert answers(index, queries) == (before if index.generation == "000001" else after)
        if index.generation != "000001":
            break
    assert kills > 20
    unnamed = {path.name for path in (tmp_path / "generations").iterdir()}
    assert len(unnamed) <= 3


def test_a_generation_that_is_damaged_leaves_the_one_before(tmp_path, gallery, monkeypatch):
    write_index(tmp_path, build_index(part(gallery, range(400)), "flat"))
    cut = partial(np.lib.format.write_array_header_1_0)

    def damaged(file, header):
        cut(file, header | {"shape": (1, 1)})

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", damaged)
    with raises("descriptors.damaged", "descriptors.npy"):
        update(tmp_path, gallery)
    monkeypatch.undo()
    assert read_index(tmp_path).generation == "000001"
    assert update(tmp_path, gallery).generation == "000002"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error")])
def test_an_error_after_the_switch_leaves_the_new_generation(tmp_path, gallery, monkeypatch, error):
    write_index(tmp_path, build_index(part(gallery, range(400)), "flat"))
    write = generations.write_whole

    def failing(path, data):
        write(path, data)
        raise error

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, OSError)):
        patch.setattr(generations, "write_whole", failing)
        update(tmp_path, gallery)
    index = read_index(tmp_path)
    assert index.generation == "000002" and len(index) == 416


def test_the_library_opens_a_folder_as_it_is(tmp_path, gallery):
    write_index(tmp_path / "index", build_index(gallery, "flat"))
    queries = gallery.descriptors[:3]
    for folder in (tmp_path / "index", str(tmp_path / "index")):
        opened = search_index(folder)
        assert answers(opened, queries) == answers(read_index(tmp_path / "index"), queries)
    for options in ({"kind": "hnsw"}, {"keys": ["a"]}):
        with raises("index.opened_as_it_is", tmp_path / "index"):
            search_index(tmp_path / "index", **options)
