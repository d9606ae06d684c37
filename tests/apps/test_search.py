import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from browser import DESKTOP, PHONE
from commands import distap
from extractions import describe_files
from galleries import CLASSES, Gallery, index_to, make_gallery, upload
from raising import raises

from distap.apps.search import open_searcher, open_thumbnails, queries_from
from distap.data.loading.reader import open_images
from distap.errors import DistapError
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.indexing import build_index
from distap.retrieval.stored_index import write_index
from distap.retrieval.whitening import learned_whitening, save_whitening
from distap.world import World


@pytest.fixture(scope="module")
def gallery(tmp_path_factory, training_shards) -> Gallery:
    return make_gallery(tmp_path_factory.mktemp("gallery"), training_shards)


@pytest.fixture
def searcher(gallery):
    return open_searcher(gallery.index, gallery.run, world=World())


def image_of(gallery, key) -> bytes:
    images = open_images(gallery.shards)
    return images.data(images.keys.tolist().index(key))


def test_hits_are_those_of_all_similarities(gallery, searcher):
    data = upload(1)
    described = read_descriptors(gallery.descriptors)
    similarities = described.descriptors @ describe_files(searcher.describer, [data]).numpy()[0]
    hits = searcher.by_image(data, 1000)
    assert len(hits) == len(described) == sum(CLASSES.values())
    np.testing.assert_allclose(
        [hit.similarity for hit in hits], np.sort(similarities)[::-1], atol=1e-6
    )
    for hit in hits:
        assert hit.similarity == pytest.approx(similarities[hit.row], abs=1e-6)
        assert (hit.key, hit.class_name) == (described.keys[hit.row], described.classes[hit.row])


@pytest.mark.parametrize("kind", ["flat", "IVF1,PQ48x3np,Refine(SQfp16)"])
def test_a_key_finds_what_its_image_finds_but_for_itself(tmp_path, gallery, kind):
    searcher = open_searcher(
        index_to(gallery, tmp_path / "index", kind), gallery.run, world=World()
    )
    key = str(searcher.index.keys[3])
    by_key = searcher.by_key(key, 5)
    by_image = searcher.by_image(image_of(gallery, key), 6)
    assert len(by_key) == 5 and key not in [hit.key for hit in by_key]
    if kind == "flat" or "Refine" in kind:
        expected = [hit.similarity for hit in by_image if hit.key != key][:5]
        np.testing.assert_allclose([hit.similarity for hit in by_key], expected, atol=2e-3)


def test_keys_need_no_network_and_images_do(gallery):
    searcher = open_searcher(gallery.index, world=World())
    assert len(searcher.by_key(str(searcher.index.keys[0]), 3)) == 3
    with raises("search.needs_network", "--checkpoint"):
        searcher.by_image(upload(0), 3)


def test_another_network_is_refused(tmp_path, gallery, training_shards):
    other = make_gallery(tmp_path, (training_shards[1], training_shards[0]))
    with pytest.raises(DistapError, match="name the checkpoint and the whitening"):
        open_searcher(gallery.index, other.run, world=World())


def test_an_index_of_whitened_descriptors_asks_for_the_whitening(
    tmp_path, gallery, monkeypatch, capsys
):
    whitening = learned_whitening(read_descriptors(gallery.descriptors), dimensions=16)
    save_whitening(tmp_path / "w.safetensors", whitening)
    options = ("--checkpoint", gallery.run, "--whitening", tmp_path / "w.safetensors")
    assert (
        distap(monkeypatch, "extract", gallery.shards, tmp_path / "d", "data.workers=0", *options)
        == 0
    )
    assert distap(monkeypatch, "index", tmp_path / "d", tmp_path / "index") == 0
    with raises("descriptors.whitening_missing", "--whitening"):
        open_searcher(tmp_path / "index", gallery.run, world=World())
    searcher = open_searcher(
        tmp_path / "index", gallery.run, tmp_path / "w.safetensors", world=World()
    )
    key = str(searcher.index.keys[5])
    assert searcher.by_image(image_of(gallery, key), 1)[0].key == key


def test_queries_are_files_folders_and_keys(tmp_path, gallery, searcher, monkeypatch):
    key = str(searcher.index.keys[0])
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "queries"
    (folder / "below").mkdir(parents=True)
    for path in (folder / "a.png", folder / "below" / "b.png"):
        path.write_bytes(upload(2))
    texts = [str(folder), str(folder / "a.png"), key, f"key:{key}"]
    actual = queries_from(texts, searcher.index)
    assert [query.file for query in actual] == [
        folder / "a.png",
        folder / "below/b.png",
        folder / "a.png",
        None,
        None,
    ]
    assert [query.key for query in actual[3:]] == [key, key]
    for text in ("nothing", "key:nothing", "x" * 5000, "\0"):
        with pytest.raises(DistapError, match="key"):
            queries_from([text], searcher.index)


def test_thumbnails_are_those_of_the_rows(gallery, searcher, caplog):
    thumbnails = open_thumbnails(searcher.index)
    first = thumbnails(0)
    assert first.startswith(b"\xff\xd8") and first != thumbnails(1)
    assert thumbnails(-1) is None and thumbnails(40) is None
    assert not caplog.text


def test_a_name_cannot_command_the_terminal_that_shows_hits(tmp_path, gallery, monkeypatch, capsys):
    described = read_descriptors(gallery.descriptors)
    described = replace(
        described, keys=np.array(["\x1b[2Jfirst", "\x1b]0;mine\x07", *described.keys[2:].tolist()])
    )
    write_index(tmp_path / "index", build_index(described, "flat"))
    assert distap(monkeypatch, "search", tmp_path / "index", "key:\x1b[2Jfirst", "-k", 40) == 0
    output = "".join(capsys.readouterr())
    assert r"\x1b[2Jfirst" in output and r"\x1b]0;mine\x07" in output and "\x1b" not in output


def test_a_data_set_that_moved_is_named_and_missing_pictures_are_told(
    tmp_path, gallery, searcher, caplog
):
    assert open_thumbnails(searcher.index, str(tmp_path / "nothing"))(0) is None
    assert "shown without pictures" in caplog.text and "--images" in caplog.text
    shutil.copytree(gallery.shards, tmp_path / "moved")
    assert open_thumbnails(searcher.index, str(tmp_path / "moved"))(0)
    caplog.clear()
    # images are called by their paths
    assert open_thumbnails(searcher.index, str(gallery.images))(0)
    assert not caplog.text
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "0.png").write_bytes(upload(1))
    assert open_thumbnails(searcher.index, str(tmp_path / "others"))(0) is None
    assert "no image for 40 of the 40 keys" in caplog.text


def test_the_command_prints_hits_as_json(tmp_path, gallery, searcher, monkeypatch, capsys):
    file = tmp_path / "query.png"
    key = "<i>apple/кот 0.png"
    file.write_bytes(upload(3))
    options = ("--checkpoint", gallery.run, "-k", 4, "--json")
    assert distap(monkeypatch, "search", gallery.index, file, key, *options) == 0
    of_file, of_key = json.loads(capsys.readouterr().out)
    expected = searcher.by_image(upload(3), 4)
    assert of_file["query"] == str(file) and of_key["query"] == f"key:{key}"
    assert [hit["key"] for hit in of_file["hits"]] == [hit.key for hit in expected]
    assert [hit["rank"] for hit in of_key["hits"]] == [1, 2, 3, 4]
    assert set(of_key["hits"][0]) == {"rank", "key", "class", "similarity"}


def test_the_command_prints_a_table_and_writes_a_page_with_pictures(
    tmp_path, gallery, searcher, monkeypatch, capsys
):
    queries = tmp_path / "queries"
    queries.mkdir()
    (queries / "<b>.png").write_bytes(upload(4))
    (queries / "damaged.png").write_bytes(upload(4)[:60])
    page = tmp_path / "page.html"
    options = ("--checkpoint", gallery.run, "-k", 40, "--output", page)
    assert distap(monkeypatch, "search", gallery.index, queries, *options) == 1
    printed, warned = capsys.readouterr()
    assert "similarity" in printed and "<i>apple" in printed
    assert "damaged.png: truncated" in warned and f"page: {page}" in printed
    text = page.read_text()
    # 40 hits and the query that can be read
    assert len(re.findall(r'href="data:image/webp;base64,', text)) == 41
    # queries are called by their files
    assert "<h2>&lt;b&gt;.png</h2>" in text and "<h2>damaged.png</h2>" in text
    assert "&lt;i&gt;apple" in text and "<i>apple" not in text and "<b>.png" not in text
    assert "truncated" in text and "http" not in text.split("</style>")[1]


def test_a_page_of_hits_looks_right_in_a_browser_and_shows_whole_keys_on_demand(
    tmp_path, gallery, searcher, browser, monkeypatch
):
    page = tmp_path / "page.html"
    key = "<i>apple/кот 0.png"
    assert distap(monkeypatch, "search", gallery.index, f"key:{key}", "--output", page) == 0
    for size in (PHONE, DESKTOP):
        browser.open(page, size)
        assert browser.sideways() <= 0 and not browser.broken_pictures() and not browser.errors()
        shown = browser.driver.find_elements("css selector", ".found svg")
        assert len(shown) == 10 and min(item.size["width"] for item in shown) > 140
        browser.driver.find_elements("css selector", ".found .zoom > summary")[9].click()
        assert shown[9].size["width"] > 300
    browser.open(page)
    assert [item.text for item in browser.driver.find_elements("tag name", "h2")] == ["кот 0.png"]
    hit = searcher.by_key(key, 1)[0]
    shown = browser.driver.find_element("css selector", ".found .key")
    summary = shown.find_element("tag name", "summary")
    folded = shown.size["height"]
    assert summary.text == hit.key.split("/")[1]
    summary.click()
    assert shown.size["height"] > folded and shown.text.splitlines()[1] == hit.key


def test_a_page_is_written_though_nobody_reads_the_table(tmp_path, gallery):
    reading, writing = os.pipe()
    os.close(reading)
    page = tmp_path / "hits.html"
    key = f"key:{read_descriptors(gallery.descriptors).keys[0]}"
    command = [
        sys.executable,
        "-m",
        "distap.cli",
        "search",
        str(gallery.index),
        key,
        "--output",
        str(page),
    ]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert page.is_file()


def test_an_index_of_images_that_are_too_large_is_refused(tmp_path, gallery):
    shutil.copytree(gallery.index, tmp_path / "index")
    about = tmp_path / "index/generations/000001/about.json"
    record = json.loads(about.read_text())
    record["described_by"]["sizing"] = "crop 30000"
    about.write_text(json.dumps(record))
    with pytest.raises(
        DistapError, match=r"about\.json.*`crop 30000`: more than 100,000,000 pixels"
    ):
        open_searcher(tmp_path / "index", gallery.run, world=World())
