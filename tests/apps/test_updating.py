"""A shop's index from Monday to Monday, by the commands and in Python."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from commands import distap
from galleries import Gallery, make_gallery, upload
from raising import raises

import distap as library
from distap.apps.search import open_searcher, open_thumbnails
from distap.apps.updating import Network, update_index
from distap.data.loading.reader import open_images
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.stored_index import read_index
from distap.world import World

HEADING = ("path", "label", "sku", "price")


@pytest.fixture(scope="module")
def gallery(tmp_path_factory, training_shards) -> Gallery:
    return make_gallery(tmp_path_factory.mktemp("gallery"), training_shards)


def write_list(path, rows, heading=HEADING):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heading, *rows])
    return path


@pytest.fixture
def shop(tmp_path, gallery, monkeypatch):
    """A shop's folder: 12 images that `list.csv` names, and their index."""
    (tmp_path / "images").mkdir()
    for number in range(12):
        (tmp_path / "images" / f"{number}.png").write_bytes(upload(number))
    rows = [
        (f"../images/{n}.png", ("shoes", "hats")[n % 2], f"sku-{n // 2}", 10 + n) for n in range(12)
    ]
    write_list(tmp_path / "lists" / "list.csv", rows)
    listed = tmp_path / "lists" / "list.csv"
    run = f"--checkpoint={gallery.run}"
    assert distap(monkeypatch, "extract", listed, tmp_path / "d", "data.workers=0", run) == 0
    assert distap(monkeypatch, "index", tmp_path / "d", tmp_path / "index") == 0
    return tmp_path


def updated(shop, gallery, source, remove=None, **options):
    network = Network(str(gallery.run))
    return update_index(shop / "index", source and str(source), remove, network, **options)


def test_a_monday_of_new_gone_replaced_and_dearer_products(shop, gallery, monkeypatch, capsys):
    for number in (12, 13):
        (shop / "images" / f"{number}.png").write_bytes(upload(number))
    (shop / "images" / "3.png").write_bytes(upload(103))
    monday = [(f"../images/{n}.png", "shoes", "sku-9", 30) for n in (12, 13)]
    monday += [("../images/3.png", "hats", "sku-1", 13), ("../images/4.png", "shoes", "sku-2", 99)]
    # a list that lies elsewhere names images in its own way
    monday += [("../images/5.png", "hats", "sku-2", 15)]
    source = write_list(shop / "more" / "monday.csv", monday)
    (shop / "gone.txt").write_text("images/0.png\nimages/1.png\n\n")
    command = (
        "index",
        shop / "index",
        "--add",
        source,
        "--replace",
        "--remove",
        shop / "gone.txt",
        "--checkpoint",
        gallery.run,
        "--json",
    )
    counts = {"new": 2, "replaced": 1, "relabelled": 1, "removed": 2, "same": 1, "left_out": 0}
    capsys.readouterr()
    assert distap(monkeypatch, *command, "--dry-run") == 0
    assert json.loads(capsys.readouterr().out) == {**counts, "generation": "000001", "images": 12}
    assert distap(monkeypatch, *command) == 0
    assert json.loads(capsys.readouterr().out) == {**counts, "generation": "000002", "images": 12}

    searcher = open_searcher(shop / "index", gallery.run, world=World())
    keys = {f"images/{number}.png" for number in range(2, 14)}
    assert {*searcher.index.keys.tolist()} == keys
    for number, seed in ((3, 103), (4, 4), (12, 12)):
        [hit] = searcher.by_image(upload(seed), 1)
        assert (hit.key, round(hit.similarity, 4)) == (f"images/{number}.png", 1)
    prices = {hit.key: hit.columns["price"] for hit in searcher.by_image(upload(0), 50)}
    assert (prices["images/4.png"], prices["images/5.png"]) == (99, 15)
    pictures = open_thumbnails(searcher.index)
    assert all(pictures(row) for row in range(12))
    assert updated(shop, gallery, source, replaces=True)["same"] == 5
    assert read_index(shop / "index").generation == "000002"

    index = library.search_index(shop / "index")
    [hits] = index.search(index.descriptor_of("images/2.png"), 9, where="price>=30", group="sku")
    assert [hit.columns["sku"] for hit in hits] in (["sku-9", "sku-2"], ["sku-2", "sku-9"])


def test_the_updated_index_equals_one_that_is_extracted_anew(shop, gallery, monkeypatch):
    (shop / "images" / "20.png").write_bytes(upload(20))
    rows = [(f"../images/{n}.png", "shoes", f"sku-{n}", n) for n in (20, 7)]
    updated(shop, gallery, write_list(shop / "lists" / "new.csv", rows), replaces=True)
    with (shop / "lists" / "list.csv").open() as file:
        lines = [line for line in csv.reader(file) if "/7.png" not in line[0]][1:]
    anew = write_list(shop / "lists" / "anew.csv", [*lines, *rows])
    extract = ("extract", anew, shop / "e", "data.workers=0", "--checkpoint", gallery.run)
    assert distap(monkeypatch, *extract) == 0
    expected = read_descriptors(shop / "e")
    index = read_index(shop / "index").images
    for name in ("sku", "price"):
        columns = [
            dict(zip(images.keys.tolist(), images.columns[name].tolist(), strict=True))
            for images in (expected, index)
        ]
        assert columns[0] == columns[1]
    order = np.argsort(expected.keys)
    of_index = np.argsort(index.keys)
    np.testing.assert_array_equal(expected.classes[order], index.classes[of_index])
    np.testing.assert_array_equal(expected.checksums[order], index.checksums[of_index])
    np.testing.assert_allclose(expected.descriptors[order], index.descriptors[of_index], atol=1e-6)


def test_what_an_update_may_not_do_is_refused_by_name_and_changes_nothing(
    shop, gallery, tmp_path_factory, training_shards
):
    (shop / "images" / "3.png").write_bytes(upload(103))
    changed = write_list(shop / "lists" / "b.csv", [("../images/3.png", "hats", "sku-1", 13)])
    with raises("index.other_contents", "bytes", "images/3.png", "--replace"):
        updated(shop, gallery, changed)
    dearer = write_list(shop / "lists" / "c.csv", [("../images/4.png", "shoes", "sku-2", 99)])
    with raises("index.other_contents", "columns", "images/4.png"):
        updated(shop, gallery, dearer)
    (shop / "gone.txt").write_text("images/3.png\nimages/33.png")
    with raises("index.unknown_keys", "1 of the 2", "images/33.png"):
        updated(shop, gallery, None, shop / "gone.txt")
    (shop / "gone.txt").write_text("images/3.png")
    with raises("index.added_and_removed", "images/3.png"):
        updated(shop, gallery, changed, shop / "gone.txt", replaces=True)
    with raises("data.unreadable", "none.txt"):
        updated(shop, gallery, None, shop / "none.txt")
    with raises("search.needs_network", "--checkpoint"):
        update_index(shop / "index", str(changed), None, None, replaces=True)
    other = make_gallery(tmp_path_factory.mktemp("other"), training_shards[::-1])
    with raises("descriptors.other_network", "checkpoint"):
        updated(shop, replace(gallery, run=other.run), changed, replaces=True)
    with raises("descriptors.missing", "nowhere"):
        updated(shop / "nowhere", gallery, changed)
    assert not (shop / "nowhere").exists()
    assert read_index(shop / "index").generation == "000001"


def test_a_damaged_image_is_left_out_and_its_old_row_stays(shop, gallery, caplog):
    (shop / "images" / "3.png").write_bytes(upload(103)[:90])
    (shop / "images" / "30.png").write_bytes(upload(30))
    rows = [(f"../images/{n}.png", "hats", "sku-1", 13) for n in (3, 30)]
    source = write_list(shop / "lists" / "b.csv", rows)
    result = updated(shop, gallery, source, replaces=True)
    assert (result["left_out"], result["images"]) == (1, 13)
    assert "images/3.png" in caplog.text
    [hit] = open_searcher(shop / "index", gallery.run, world=World()).by_image(upload(3), 1)
    assert hit.key == "images/3.png"


@pytest.mark.parametrize("dry", [True, False])
def test_a_listed_photo_that_is_not_there_is_counted_and_named(shop, gallery, caplog, dry):
    (shop / "images" / "3.png").unlink()
    rows = [(f"../images/{n}.png", "hats", "sku-1", 99) for n in (3, 77)]
    source = write_list(shop / "lists" / "b.csv", rows)
    result = updated(shop, gallery, source, replaces=True, dry=dry)
    assert (result["left_out"], result["images"], result["relabelled"]) == (2, 12, 0)
    assert "2 listed images that are not there" in caplog.text
    assert "3.png" in caplog.text


def test_columns_that_come_or_are_missing_are_logged(shop, gallery, caplog):
    (shop / "images" / "30.png").write_bytes(upload(30))
    heading = ("path", "label", "sku", "colour")
    row = ("../images/30.png", "hats", "sku-1", "red")
    updated(shop, gallery, write_list(shop / "lists" / "b.csv", [row], heading))
    assert "price" in caplog.text and "colour" in caplog.text
    index = read_index(shop / "index")
    assert index.columns.cells(12) == {"sku": "sku-1", "colour": "red"}
    assert index.columns.cells(0) == {"sku": "sku-0", "price": 10}


def test_shards_carry_keys_and_columns_of_their_list(shop, gallery, monkeypatch):
    heading = ("path", "label", "key", "price", "text")
    rows = [(f"../images/{n}.png", "hats", f"product {n}", n, "x" * 300) for n in range(5)]
    source = write_list(shop / "lists" / "keyed.csv", rows, heading)
    assert distap(monkeypatch, "data", "pack", source, shop / "shards") == 0
    images = open_images(shop / "shards")
    assert sorted(images.keys.tolist()) == [f"product {n}" for n in range(5)]
    assert sorted(images.index.further["price"].tolist()) == list("01234")
    assert [*images.index.further] == ["price"]  # `text` is too long
    (shop / "shards" / "index.npz").unlink()
    assert distap(monkeypatch, "data", "index", shop / "shards") == 0
    assert sorted(open_images(shop / "shards").index.further["price"].tolist()) == list("01234")
    shutil.rmtree(shop / "shards")
    with raises("data.repeated_key", "product 0"):
        rows[1] = (*rows[1][:2], "product 0", 1, "")
        open_images(write_list(source, rows, heading))


def test_a_price_that_is_a_text_is_logged(shop, gallery, caplog):
    asked = [("../images/3.png", "hats", "sku-1", "on request")]
    source = write_list(shop / "lists" / "monday.csv", asked)
    updated(shop, gallery, source, replaces=True)
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "price" in warning.getMessage()


def test_a_damaged_image_alone_writes_no_generation(shop, gallery):
    (shop / "images" / "50.png").write_bytes(b"damaged")
    source = write_list(shop / "lists" / "more.csv", [("../images/50.png", "hats", "sku-1", 13)])
    result = updated(shop, gallery, source)
    assert (result["new"], result["left_out"], result["images"]) == (1, 1, 12)
    assert result["generation"] == read_index(shop / "index").generation == "000001"
    # Nor does it keep others from going.
    (shop / "gone.txt").write_text("images/0.png\n")
    result = updated(shop, gallery, source, shop / "gone.txt")
    assert (result["removed"], result["images"], result["generation"]) == (1, 11, "000002")
