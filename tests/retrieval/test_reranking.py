import numpy as np
import pytest
from postprocessing_reference import clustered, first_ranking, k_reciprocal

from distap.retrieval.refinement import KReciprocal, reranked_heads

SIZES = [1, 2, 15, 500]


@pytest.fixture(scope="module")
def gallery():
    return clustered(30, 6, 5, seed=7).descriptors


@pytest.fixture(scope="module")
def queries():
    return clustered(3, 6, 5, seed=7, noise=0.9).descriptors


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("settings", [(6, 3, 0.3), (20, 6, 0.0), (3, 1, 0.5), (1, 2, 0.9)])
def test_k_reciprocal_is_the_paper_by_sets(queries, gallery, size, exclude_self, settings):
    asked = gallery[:3] if exclude_self else queries
    heads = reranked_heads(KReciprocal(*settings), asked, gallery, size, exclude_self).numpy()
    assert heads.shape == (3, min(size, 30 - exclude_self))
    for number, head in enumerate(heads):
        own = number if exclude_self else None
        expected, distances = k_reciprocal(asked[number], gallery, size, own, *settings)
        assert sorted(head) == sorted(expected)
        of_row = dict(zip(first_ranking(asked[number], gallery, size, own), distances, strict=True))
        assert np.all(np.diff([of_row[row] for row in head]) >= -1e-6)


def test_exact_duplicates_and_a_collapsed_model_are_reordered_without_loss():
    values = np.ones((30, 4), np.float32) / 2
    heads = reranked_heads(KReciprocal(), values, values, 20, exclude_self=True)
    for number, head in enumerate(heads.tolist()):
        assert len(set(head)) == 20 and number not in head
