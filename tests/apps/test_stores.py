"""Copies of an index in LanceDB and Qdrant answer as the index does."""

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import distap
from postprocessing_reference import clustered
from raising import raises

from distap.apps.stores.copying import copy_index
from distap.apps.stores.opening import open_gallery, open_store
from distap.retrieval.changing import changed_index
from distap.retrieval.generations import updating
from distap.retrieval.indexing import build_index
from distap.retrieval.joining import taken_images
from distap.retrieval.stored_index import read_index, write_index, write_next

STORES = ("lancedb", "qdrant")
# local mode of Qdrant warns of what it lacks, and LanceDB's threads of forks
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def gallery():
    images = clustered(320, 16, 30)
    generator = np.random.default_rng(3)
    columns = {
        "kind": np.array(["shoes", "it's", "", "é"])[generator.integers(0, 4, 320)],
        "list price": np.array([f"{n / 2:g}" for n in generator.integers(0, 100, 320)]),
    }
    columns["list price"][:5] = ""
    return replace(images, columns=columns)


@pytest.fixture
def folder(tmp_path, gallery):
    images = taken_images(gallery, np.arange(300))
    images = replace(images, descriptors=np.array(images.descriptors[:]))
    write_index(tmp_path / "index", build_index(images, "flat"))
    return tmp_path / "index"


def answers(index, queries, **options):
    return [
        [(hit.key, hit.class_name, round(hit.similarity, 4), dict(hit.columns)) for hit in hits]
        for hits in index.search(queries, 8, **options)
    ]


@pytest.mark.parametrize("kind", STORES)
def test_a_store_answers_as_the_index_after_a_copy_and_after_an_update(
    tmp_path, folder, gallery, kind
):
    index = read_index(folder)
    store = open_store(f"{kind}:{tmp_path / 'store'}")
    assert copy_index(index, store) == {"written": 300, "deleted": 0, "images": 300}
    assert copy_index(index, store)["written"] == 0
    queries = gallery.descriptors[::40]
    copied = open_gallery(store, kind)
    for where in (
        None,
        "kind=shoes",
        "kind != it's",
        ["kind in it's,é", "list price<=20"],
        "list price in 3,4.5,7,8",
        "list price!=3",
        {"class": ["class-1", "class-2", "class-3"]},
        "key=image-17",
    ):
        assert answers(copied, queries, where=where) == answers(index, queries, where=where), where
    np.testing.assert_allclose(copied.descriptor_of("image-3"), gallery.descriptors[3], atol=1e-6)
    assert copied.makers == index.makers
    with raises("search.unknown_column", "colour", "kind"):
        copied.search(queries, 3, where="colour=red")
    with raises("search.no_groups", "kind"):
        copied.search(queries, 3, group="kind")
    with raises("index.no_such_key", "nothing"):
        copied.descriptor_of("nothing")

    added = taken_images(gallery, np.arange(300, 320))
    added = replace(added, descriptors=np.array(added.descriptors[:]))
    with updating(folder):
        changed = changed_index(read_index(folder, changeable=True), np.arange(7), added)
        index = write_next(folder, changed)
    assert copy_index(index, store) == {"written": 20, "deleted": 7, "images": 313}
    copied = open_gallery(store, kind)
    assert copied.record["generation"] == "000002"
    assert answers(copied, queries) == answers(index, queries)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize(
    "where",
    [
        {"kind": ""},
        {"kind": ["", "shoes"]},
        {"kind": {"!=": ""}},
        {"list price": ""},
        {"list price": ["", 3]},
        {"list price": {"!=": ["", 3]}},
        {"list price": "none"},
        {"list price": {"!=": "none"}},
        {"list price": {"<=": 0.1 + 20.2}},
    ],
)
def test_a_store_takes_empty_cells_and_texts_for_numbers_as_the_index_does(
    copied, gallery, kind, where
):
    index, stores = copied
    queries = gallery.descriptors[:3]
    assert answers(stores[kind], queries, where=where) == answers(index, queries, where=where)


@pytest.fixture(scope="module")
def copied(tmp_path_factory, gallery):
    """An index, and a store of each kind with the same rows."""
    folder = tmp_path_factory.mktemp("copied")
    write_index(folder / "index", build_index(gallery, "flat"))
    index = read_index(folder / "index")
    stores = {}
    for kind in STORES:
        store = open_store(f"{kind}:{folder / kind}")
        copy_index(index, store)
        stores[kind] = open_gallery(store, kind)
    return index, stores


@pytest.mark.parametrize("name", ["stamp", "Key", "_distance", "size.eu"])
def test_a_column_that_a_store_cannot_hold_is_refused_by_name(tmp_path, gallery, name):
    images = replace(gallery, columns={name: gallery.columns["kind"]})
    write_index(tmp_path / "index", build_index(images, "flat"))
    for kind in STORES:
        with raises("index.reserved_column", name):
            copy_index(read_index(tmp_path / "index"), open_store(f"{kind}:{tmp_path / kind}"))


@pytest.mark.parametrize(
    "option", [("--dry-run",), ("--add", "list.csv"), ("--remove", "gone.txt"), ("--replace",)]
)
def test_a_copy_is_no_update(tmp_path, folder, monkeypatch, capsys, option):
    target = tmp_path / "images.sql"
    assert distap(monkeypatch, "index", folder, "--to", f"pgvector:{target}", *option) == 2
    error = capsys.readouterr().err
    assert "command.conflict" in error and option[0] in error
    assert not target.exists()


@pytest.mark.parametrize("kind", STORES)
def test_a_copy_that_was_stopped_goes_on(tmp_path, folder, gallery, kind, monkeypatch):
    index = read_index(folder)
    store = open_store(f"{kind}:{tmp_path / 'store'}")
    write = type(store).write
    batches = []

    def stopping(self, rows):
        batches.append(rows)
        if len(batches) > 2:
            raise KeyboardInterrupt
        write(self, rows)

    monkeypatch.setattr("distap.apps.stores.copying.BATCH", 100)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(store), "write", stopping)
        copy_index(index, store)
    assert copy_index(index, store)["written"] == 100
    queries = gallery.descriptors[:3]
    assert answers(open_gallery(store, kind), queries) == answers(index, queries)


def test_the_commands_copy_and_search(tmp_path, folder, monkeypatch, capsys):
    url = f"lancedb:{tmp_path / 'store'}"
    assert distap(monkeypatch, "index", folder, "--to", url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["written"] == 300
    query = ("search", "key:image-40", "-k", 3, "--where", "list price<=30", "--json")
    assert distap(monkeypatch, *query, "--in", url) == 0
    of_store = json.loads(capsys.readouterr().out)
    assert distap(monkeypatch, query[0], folder, *query[1:]) == 0
    of_index = json.loads(capsys.readouterr().out)
    for hits in (of_store[0]["hits"], of_index[0]["hits"]):
        for hit in hits:
            hit["similarity"] = round(hit["similarity"], 5)
    assert of_store == of_index
    assert distap(monkeypatch, *query, "--in", f"lancedb:{tmp_path / 'none'}") == 2
    assert "search.no_store" in capsys.readouterr().err
    assert distap(monkeypatch, "index", folder, "--to", "redis:x") == 2
    assert "search.unknown_store" in capsys.readouterr().err


def test_a_script_for_pgvector_copies_each_row(tmp_path, folder, gallery, monkeypatch):
    path = tmp_path / "images.sql"
    assert distap(monkeypatch, "index", folder, "--to", f"pgvector:{path}") == 0
    lines = path.read_text().splitlines()
    start = lines.index("COPY distap_images FROM STDIN;") + 1
    rows = [line.split("\t") for line in lines[start : lines.index("\\.")]]
    assert len(rows) == 300 and rows[0][3] == "\\N"  # no price
    assert rows[17][:2] == ["image-17", gallery.classes[17]]
    assert json.loads(rows[17][4]) == pytest.approx(gallery.descriptors[17].tolist(), rel=1e-6)
    [table] = [line for line in lines if line.startswith("CREATE TABLE distap_images (")]
    assert '"list price" double precision' in table and "vector(16)" in table
    # No server here has pgvector, so hold the statements to words that PostgreSQL knows.
    statements = " ".join(lines[: start - 1] + lines[lines.index("\\.") + 1 :])
    assert "SQL_TABLE" not in statements and "DROP TABLE IF EXISTS distap_images;" in statements
    assert lines[0] == "\\set ON_ERROR_STOP on"
