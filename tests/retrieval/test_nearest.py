import subprocess
import sys

import numpy as np
import pytest

from distap.errors import DistapError
from distap.retrieval.row_blocks import nearest


def sorted_whole(queries, gallery, k, exclude_self):
    """All similarities of small integers, which are exact, sorted; ties by row."""
    similarities = queries.astype(np.float64) @ gallery.astype(np.float64).T
    rows = [
        sorted(
            (r for r in range(len(gallery)) if not (exclude_self and r == q)),
            key=lambda r: (-row[r], r),
        )[:k]
        for q, row in enumerate(similarities)
    ]
    rows = np.array(rows, np.int64).reshape(len(queries), -1)
    return np.take_along_axis(similarities, rows, axis=1), rows


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("k", [1, 7, 90, 500])
def test_the_nearest_are_those_of_sorting_everything(monkeypatch, tmp_path, dtype, exclude_self, k):
    monkeypatch.setattr("distap.retrieval.row_blocks.BLOCK_NUMBERS", 160)  # 20 rows a block
    values = np.random.default_rng(k).permutation(90 * 8).reshape(90, 8).astype(dtype)
    np.save(tmp_path / "gallery.npy", values)
    gallery = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    similarities, rows = nearest(gallery[:50], gallery, k, exclude_self)
    expected_similarities, expected_rows = sorted_whole(values[:50], values, k, exclude_self)
    assert rows.shape == (50, min(k, 90 - exclude_self))
    np.testing.assert_allclose(similarities, expected_similarities, rtol=1e-6)
    np.testing.assert_array_equal(rows, expected_rows)


def test_a_query_is_left_out_by_its_index_also_where_duplicates_exist():
    gallery = np.eye(3, dtype=np.float32).repeat(5, axis=0)
    similarities, rows = nearest(gallery, gallery, 4, exclude_self=True)
    assert (similarities == 1).all()
    for query, neighbours in enumerate(rows.tolist()):
        group = 5 * (query // 5)
        assert neighbours == [row for row in range(group, group + 5) if row != query]


def test_fewer_than_one_neighbour_is_an_empty_result():
    item = np.ones((1, 4), np.float32)
    assert nearest(item, item, 3, exclude_self=True)[1].shape == (1, 0)
    assert nearest(item, item[:0], 3)[1].shape == (1, 0)
    assert nearest(item[:0], item, 3)[1].shape == (0, 1)


def test_what_is_not_finite_is_named_by_its_row(monkeypatch):
    monkeypatch.setattr("distap.retrieval.row_blocks.BLOCK_NUMBERS", 8)
    gallery = np.ones((9, 4), np.float32)
    gallery[7, 2] = np.nan
    with pytest.raises(DistapError, match="descriptor 7 is not finite"):
        nearest(gallery[:2], gallery, 3)


@pytest.mark.nightly
def test_without_faiss_everything_but_search_can_be_used(monkeypatch):
    code = (
        "import sys; sys.modules['faiss'] = None; import distap.train, distap.evaluation.sets,"
        " distap.library"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(DistapError, match=r"needs Faiss: pip install 'distap\[cpu\]'"):
        nearest(np.ones((1, 4), np.float32), np.ones((2, 4), np.float32), 1)
