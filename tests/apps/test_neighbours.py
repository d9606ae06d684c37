"""Neighbours of every image, and near duplicates, against slow loops."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from commands import distap
from postprocessing_reference import clustered

from distap.apps.neighbours import near_duplicates, neighbours_of_all
from distap.retrieval.indexing import build_index
from distap.retrieval.stored_index import write_index


@pytest.fixture(scope="module")
def gallery():
    images = clustered(300, 16, 30)
    generator = np.random.default_rng(3)
    # 40 copies of an image, of which each must find all the nearest, and pairs
    values = images.descriptors.copy()
    values[100:140] = values[100]
    values[200:210] = values[210:220]
    product = np.array([f"p{number}" for number in generator.integers(0, 50, 300)])
    return replace(images, descriptors=values, columns={"product": product})


def test_each_image_has_the_nearest_others(gallery):
    table = neighbours_of_all(build_index(gallery, "flat"), 7)
    similarities = gallery.descriptors.astype(np.float64) @ gallery.descriptors.T
    np.fill_diagonal(similarities, -2)
    best = np.sort(similarities, axis=1)[:, ::-1][:, :7]
    np.testing.assert_allclose(table.similarity.reshape(300, 7), best, atol=1e-6)
    actual = similarities[table.query, table.neighbour]
    np.testing.assert_allclose(table.similarity, actual, atol=1e-6)
    assert table.rank.reshape(300, 7)[5].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (table.query != table.neighbour).all() and table.names[3] == "image-3"


def test_each_product_has_the_nearest_other_products(gallery):
    table = neighbours_of_all(build_index(gallery, "flat"), 4, "product")
    similarities = gallery.descriptors.astype(np.float64) @ gallery.descriptors.T
    products = gallery.columns["product"]
    for number, name in enumerate(table.names):
        members = products == name
        nearest = {
            product: similarities[np.ix_(members, products == product)].max()
            for product in set(products.tolist()) - {name}
        }
        expected = sorted(nearest.values(), reverse=True)[:4]
        rows = table.query == number
        np.testing.assert_allclose(table.similarity[rows], expected, atol=1e-6)
        for other, value in zip(table.neighbour[rows], table.similarity[rows], strict=True):
            assert nearest[table.names[other]] == pytest.approx(value, abs=1e-6)


def test_duplicates_are_the_components_of_similar_pairs(gallery):
    for threshold in (0.9999, 0.9):
        similar = gallery.descriptors @ gallery.descriptors.T >= threshold
        reached = similar.copy()
        for _ in range(9):
            reached = reached @ reached
        expected = {tuple(np.flatnonzero(row).tolist()) for row in reached if row.sum() > 1}
        groups = near_duplicates(build_index(gallery, "flat"), threshold)
        assert {*map(tuple, groups)} == expected
    assert groups[0] == sorted(groups[0]) and len(groups[0]) >= 40


def test_the_command_writes_tables_groups_and_a_page(tmp_path, gallery, monkeypatch, capsys):
    from pyarrow import parquet

    write_index(tmp_path / "index", build_index(gallery, "flat"))

    def run(output, *options):
        return distap(
            monkeypatch, "neighbours", tmp_path / "index", "--output", tmp_path / output, *options
        )

    assert run("a.parquet", "--k", 3) == run("a.csv", "--k", 3) == 0
    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    with (tmp_path / "a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [row["neighbour"] for row in rows] == [line["neighbour"] for line in lines]
    assert len(rows) == 900 and {row["rank"] for row in rows} == {1, 2, 3}
    assert run("d.json", "--duplicates", 0.999, "--page", tmp_path / "d.html") == 0
    groups = json.loads((tmp_path / "d.json").read_text())["groups"]
    assert len(groups[0]) == 40 and "image-139" in (tmp_path / "d.html").read_text()
    assert run("d.parquet", "--duplicates", 0.999) == 2
    assert "command.conflict" in capsys.readouterr().err


def test_groups_of_keys_have_the_keys_as_names(gallery):
    table = neighbours_of_all(build_index(gallery, "flat"), 2, "key")
    assert sorted(table.names) == sorted(gallery.keys.tolist())


def test_a_similarity_above_one_is_refused(tmp_path, gallery, monkeypatch, capsys):
    write_index(tmp_path / "index", build_index(gallery, "flat"))
    output = f"--output={tmp_path / 'd.json'}"
    assert distap(monkeypatch, "neighbours", tmp_path / "index", output, "--duplicates", 98) == 2
    assert not (tmp_path / "d.json").exists()
