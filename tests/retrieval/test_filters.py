"""Filters and groups against slow loops over all rows."""

from dataclasses import replace

import numpy as np
import pytest
from postprocessing_reference import clustered
from raising import raises

from distap.retrieval import searching
from distap.retrieval.filters import ImageColumns
from distap.retrieval.indexing import build_index, search_index

CATEGORIES = ("shoes", "hats, caps", "é", "")


@pytest.fixture(scope="module")
def gallery():
    images = clustered(400, 16, 40)
    generator = np.random.default_rng(7)
    columns = {
        "category": np.array(CATEGORIES)[generator.integers(0, 4, 400)],
        "price": np.array([f"{n / 4:g}" for n in generator.integers(0, 400, 400)]),
        "product": np.array([f"p{n}" if n else "" for n in generator.integers(0, 60, 400)]),
        "code": np.array([f"{n:03d}" for n in generator.integers(0, 20, 400)]),
    }
    columns["price"][:3] = ""
    return replace(images, columns=columns)


CONDITIONS = {
    "category=shoes": lambda row: row["category"] == "shoes",
    "category != shoes": lambda row: row["category"] != "shoes",
    'category in "hats, caps", e\u0301': lambda row: row["category"] in ("hats, caps", "é"),
    "price<=50": lambda row: row["price"] != "" and float(row["price"]) <= 50,
    "price > 12.5": lambda row: row["price"] != "" and float(row["price"]) > 12.5,
    "price=7.50": lambda row: row["price"] != "" and float(row["price"]) == 7.5,
    "code=7": lambda row: False,
    "code=007": lambda row: row["code"] == "007",
    "class in class-3,class-4": lambda row: row["class"] in ("class-3", "class-4"),
    "key=image-17": lambda row: row["key"] == "image-17",
}


def rows_by_loop(gallery, *conditions):
    chosen = []
    for number in range(len(gallery)):
        row = {name: str(texts[number]) for name, texts in gallery.columns.items()}
        row |= {"key": str(gallery.keys[number]), "class": str(gallery.classes[number])}
        if all(CONDITIONS[condition](row) for condition in conditions):
            chosen.append(number)
    return chosen


def ranked_by_loop(gallery, query, rows, k, group=None):
    similarities = gallery.descriptors @ query
    hits, seen = [], set()
    for row in sorted(rows, key=lambda row: -similarities[row]):
        name = row if group is None else str(gallery.columns[group][row]) or row
        if name not in seen:
            seen.add(name)
            hits.append(row)
    return hits[:k]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_chooses_the_rows_of_a_loop(gallery, condition):
    assert ImageColumns(gallery).rows(condition).tolist() == rows_by_loop(gallery, condition)


def test_a_dict_says_the_same_as_texts(gallery):
    columns = ImageColumns(gallery)
    texts = ["category=shoes", "price<=50", "price>12.5", "class in class-3,class-4,class-5"]
    limits = {"<=": 50, ">": 12.5}
    classes = {"class-3", "class-4", "class-5"}
    chosen = columns.rows({"category": "shoes", "price": limits, "class": classes})
    np.testing.assert_array_equal(chosen, columns.rows(texts))
    assert columns.rows(None) is columns.rows([]) is None


@pytest.mark.parametrize("kind", ["flat", "hnsw", "IVF8,Flat", "OPQ8,IVF8,PQ8x4", "SQ8"])
@pytest.mark.parametrize("exact_rows", [0, 10**6])
def test_filters_and_groups_rank_what_a_loop_ranks(monkeypatch, gallery, kind, exact_rows):
    monkeypatch.setattr(searching, "EXACT_ROWS", exact_rows)
    index = build_index(gallery, kind, "nprobe=8" if "IVF" in kind else "")
    query = gallery.descriptors[11]
    for conditions in (("price<=50",), ("category=shoes", "price > 12.5"), ()):
        rows = rows_by_loop(gallery, *conditions)
        for group in (None, "product"):
            [hits] = index.search(query, 12, where=conditions, group=group)
            expected = ranked_by_loop(gallery, query, rows, 12, group)
            is_exact = kind in ("flat", "hnsw", "IVF8,Flat")
            if is_exact or (exact_rows and conditions and group is None):
                assert [hit.row for hit in hits] == expected, (conditions, group)
            assert len(hits) == 12 and {hit.row for hit in hits} <= {*rows}
            names = [hit.columns.get("product", hit.row) for hit in hits]
            assert group is None or len(set(names)) == 12


def test_there_are_as_many_hits_as_rows_or_groups_even_where_lists_are_not_read(gallery):
    index = build_index(gallery, "IVF64,Flat", "nprobe=1")
    [hits] = index.search(gallery.descriptors[0], 1000, group="product")
    assert len(hits) == len(
        ranked_by_loop(gallery, gallery.descriptors[0], range(400), 400, "product")
    )
    [hits] = index.search(gallery.descriptors[0], 1000, where="price<=50")
    assert len(hits) == len(rows_by_loop(gallery, "price<=50"))
    assert index.search(gallery.descriptors[:2], 5, where="category=boots") == [[], []]


def test_hits_have_cells_as_numbers_or_texts(gallery):
    [[hit]] = build_index(gallery, "flat").search(gallery.descriptors[20], 1)
    price = str(gallery.columns["price"][20])
    assert hit.columns["price"] == float(price)
    assert hit.columns["code"] == gallery.columns["code"][20]
    assert "product" not in hit.columns or hit.columns["product"] != ""


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        ("colour=red", "search.unknown_column", ("colour", "category")),
        ("pricey", "search.no_condition", ("pricey", "price<=50")),
        ("category<3", "search.no_number", ("category", "texts")),
        ("price<cheap", "search.no_number", ("cheap",)),
        ({"price": {"~": 3}}, "search.no_condition", ("price", "~")),
    ],
)
def test_a_condition_that_cannot_be_answered_is_refused_by_name(gallery, where, code, words):
    index = search_index(gallery.descriptors)
    with raises(code, *words):
        build_index(gallery, "flat").search(gallery.descriptors[0], 3, where=where)
    with raises("search.unknown_column", "class"):
        index.search(gallery.descriptors[0], 3, group="product")


def test_a_condition_finds_a_key_in_any_unicode_form(gallery):
    keys = gallery.keys.astype("U20")
    keys[3], keys[4] = "cafe\u0301", "th\u00e9"
    index = build_index(replace(gallery, keys=keys), "flat")
    where = {"key": ["caf\u00e9", "the\u0301"]}
    assert index.columns.rows(where).tolist() == [3, 4]


@pytest.mark.parametrize("limit", [0.1 + 0.2, 1e-7, 1e20, "1e1", ".5", np.float32(0.1)])
def test_a_limit_may_be_any_finite_number(gallery, limit):
    prices = np.array(["0.25", "0.3", "7", "12", ""])[np.arange(len(gallery)) % 5]
    index = build_index(replace(gallery, columns={"price": prices}), "flat")
    expected = [row for row, price in enumerate(prices) if price and float(price) <= float(limit)]
    assert index.columns.rows({"price": {"<=": limit}}).tolist() == expected
