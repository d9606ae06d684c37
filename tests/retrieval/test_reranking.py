import numpy as np
import pytest
from postprocessing_reference import clustered, diffused, first_ranking, k_reciprocal, unit

from distap.retrieval.refinement import RERANKERS, Diffusion, KReciprocal, reranked_heads

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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("settings", [(5, 3, 3.0, 0.99), (50, 10, 1.0, 0.9), (1, 1, 3.0, 0.5)])
def test_diffusion_is_the_dense_solution(queries, gallery, size, exclude_self, settings):
    asked = gallery[:3] if exclude_self else queries
    reranker = Diffusion(*settings)
    heads = reranked_heads(reranker, asked, gallery, size, exclude_self).numpy()
    for number, head in enumerate(heads):
        own = number if exclude_self else None
        _, scores = diffused(asked[number], gallery, size, own, *settings)
        first = first_ranking(asked[number], gallery, size, own)
        np.testing.assert_allclose(reranker.scores(asked[number], gallery[first]), scores, atol=1e-6)
        of_row = dict(zip(first, scores, strict=True))
        assert sorted(head) == sorted(first)
        assert np.all(np.diff([of_row[row] for row in head]) <= 1e-6)


def test_images_that_no_path_joins_to_the_query_keep_their_order():
    gallery = np.concatenate([np.eye(8, dtype=np.float32)[:3].repeat(4, axis=0), np.eye(8, dtype=np.float32)[4:6]])
    query = unit(np.array([[3, 2, 1, 0, 0.2, 0.1, 0, 0]], np.float32))
    head = reranked_heads(Diffusion(neighbours=3, seeds=4), query, gallery, 14)
    (head,) = head.tolist()
    assert sorted(head[:12]) == list(range(12)) and head[12:] == [12, 13]
    assert [image // 4 for image in head[:12]] == [0] * 4 + [1] * 4 + [2] * 4  # four of each are the same


@pytest.mark.parametrize("reranker", [kind() for kind in RERANKERS.values()], ids=RERANKERS)
def test_exact_duplicates_and_a_collapsed_model_are_reordered_without_loss(reranker):
    values = np.ones((30, 4), np.float32) / 2
    heads = reranked_heads(reranker, values, values, 20, exclude_self=True)
    for number, head in enumerate(heads.tolist()):
        assert len(set(head)) == 20 and number not in head
