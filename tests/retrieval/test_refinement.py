import numpy as np
import pytest
from postprocessing_reference import clustered, expanded

from distap.retrieval.refinement import Expansion


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
    queries = clustered(9, 8, 7, seed=4).descriptors  # far from most: some similarities are below zero
    expected = expanded(queries, gallery, neighbours, power, exclude_self=False)
    actual = Expansion(neighbours, power).apply(queries, gallery)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_gallery_is_augmented_without_each_descriptor_itself(gallery):
    gallery[5:9] = gallery[5]  # duplicates count as neighbours, the row itself does not
    expected = expanded(gallery, gallery, 6, 2.0, exclude_self=True)
    np.testing.assert_allclose(Expansion(6, 2.0).apply(gallery, gallery, same=True), expected, atol=1e-6)


def test_a_memory_map_in_half_precision_stays_so(tmp_path, gallery):
    np.save(tmp_path / "gallery.npy", gallery.astype(np.float16))
    mapped = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    augmented = Expansion(5).apply(mapped, mapped, same=True)
    single = np.array(mapped, np.float32)
    assert augmented.dtype == np.float16 and not isinstance(augmented, np.memmap)
    np.testing.assert_allclose(augmented, Expansion(5).apply(single, single, same=True), atol=1e-3)
