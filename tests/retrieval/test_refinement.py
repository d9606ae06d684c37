import numpy as np
import pytest
from postprocessing_reference import clustered, first_ranking, k_reciprocal
from postprocessing_reference import expanded as slowly_expanded

from distap.retrieval.refinement import expanded, reranked_heads


@pytest.fixture
def gallery():
    return clustered(60, 8, 7, seed=3).descriptors


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("distap.retrieval.refinement.NEAR_NUMBERS", 300)
    monkeypatch.setattr("distap.retrieval.row_blocks.BLOCK_NUMBERS", 100)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("neighbours", [0, 1, 10, 200])
def test_expansion_is_the_formula_of_the_paper(gallery, neighbours, power):
    # far from most: some similarities are below zero
    queries = clustered(9, 8, 7, seed=4).descriptors
    expected = slowly_expanded(queries, gallery, neighbours, power, exclude_self=False)
    actual = expanded(queries, gallery, neighbours, power)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_gallery_is_augmented_without_each_descriptor_itself_in_its_own_type(tmp_path, gallery):
    gallery[5:9] = gallery[5]  # duplicates count as neighbours, the row itself does not
    expected = slowly_expanded(gallery, gallery, 6, 2.0, exclude_self=True)
    np.testing.assert_allclose(expanded(gallery, gallery, 6, 2.0, same=True), expected, atol=1e-6)
    np.save(tmp_path / "gallery.npy", gallery.astype(np.float16))
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    augmented = expanded(mapped, mapped, 5, 2.0, same=True)
    single = np.array(mapped, np.float32)
    assert augmented.dtype == np.float16 and not isinstance(augmented, np.memmap)
    np.testing.assert_allclose(augmented, expanded(single, single, 5, 2.0, same=True), atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 15, 500])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("settings", [(6, 3, 0.3), (20, 6, 0.0), (3, 1, 0.5), (1, 2, 0.9)])
def test_k_reciprocal_is_the_paper_by_sets(size, same, settings):
    gallery = clustered(30, 6, 5, seed=7).descriptors
    asked = gallery[:3] if same else clustered(3, 6, 5, seed=7, noise=0.9).descriptors
    heads = reranked_heads(asked, gallery, size, same, *settings).numpy()
    assert heads.shape == (3, min(size, 30 - same))
    for number, head in enumerate(heads):
        own_row = number if same else None
        expected, distances = k_reciprocal(asked[number], gallery, size, own_row, *settings)
        assert sorted(head) == sorted(expected)
        of_row = dict(
            zip(first_ranking(asked[number], gallery, size, own_row), distances, strict=True)
        )
        assert np.all(np.diff([of_row[row] for row in head]) >= -1e-6)


def test_exact_duplicates_and_a_collapsed_model_are_reordered_without_loss():
    values = np.ones((30, 4), np.float32) / 2
    for number, head in enumerate(reranked_heads(values, values, 20, same=True).tolist()):
        assert len(set(head)) == 20 and number not in head
